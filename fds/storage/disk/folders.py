"""Folders of a run: tags, `latest`, and how a new tag is published completely or not at all.

A save writes everything below `dir/.saving`, durably, and only then renames: the tag that it replaces to `.saving/old`,
its own folder to its place, and `latest` last. Each rename is atomic, so a killed process leaves a directory in which
the last complete save is found: in its place or, between the first two renames, in `.saving/old`. Tags that are no
longer kept are removed last, once the new one is durable. Where each rank has a directory, a replaced tag is kept in
`.saving/old` until all ranks have the new one: as `TAG`, then `TAG~`, `TAG~~`, the newest with the longest name.

A run's id is in its manifests: two runs that save into one directory by turns would remove each other's. A process
remembers by directory which run it began or loaded there, and goes on with that one alone: a job that is started again
loads first, and then is the same run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from fds.errors import StorageError, nearest
from fds.media.locks import lock_file
from fds.storage.disk.files import hold_alone, read_small, refusal, sync, write_errors
from fds.storage.format.manifest import NAME, read_manifest, run_of

LATEST, SAVING, LOCK = "latest", ".saving", ".lock"


def check_tag(tag: object) -> str:
    """Return `tag` if it is valid as the name of a folder. Raises `StorageError`."""
    if not isinstance(tag, str) or not re.fullmatch(r"\w[\w.+=,@-]*", tag) or tag.lower() == LATEST:
        want = f"letters, digits and any of _.+=,@- after the first, and not {LATEST!r}"
        raise refusal("not a tag", "tag", repr(tag)[:80], want)
    return tag


def tags(dir: Path) -> list[str]:
    """Return the tags that can be loaded from a run's directory, sorted."""
    manifests = [*dir.glob(f"*/{NAME}"), *dir.glob(f"{SAVING}/old/*/{NAME}")]
    return sorted({path.parent.name.rstrip("~") for path in manifests if not path.parent.name.startswith(".")})


def versions(dir: Path, tag: str) -> list[Path]:
    """Return the folders of a tag that can be loaded, the newest first; several if not all ranks replaced it."""
    return [path for path in (dir / tag, *_replaced(dir, tag)) if (path / NAME).exists()]


def find(dir: Path, tag: str | None) -> Path:
    """Return the folder of a tag, by default the last. Raises a `StorageError` that lists the tags."""
    have = tags(dir) if dir.is_dir() else []
    if not have:
        got = "nothing" if not dir.exists() else "a directory" if dir.is_dir() else "a file"
        raise refusal("there is no save here", str(dir), got, "a directory that fds.save wrote", _hint(dir))
    where = dir if tag is not None else dir / LATEST
    tag = _latest(dir, have) if tag is None else tag
    if tag not in have:
        want = "one of " + ", ".join(map(repr, have))
        raise refusal("there is no save under this tag", str(where), repr(tag)[:80], want, nearest(str(tag), have))
    return versions(dir, tag)[0]


def unpublished(dir: Path, tag: str) -> Path:
    """Return the folder into which a tag is written before it is published."""
    return dir / SAVING / "new" / tag


def reports_folder(dir: Path) -> Path:
    """Return the folder in which the ranks of a save report to the first one that they are done."""
    return dir / SAVING / "reports"


@contextlib.contextmanager
def publish(dir: Path, tag: str, keep: int | None = None, *, stays: bool = False) -> Iterator[Path]:
    """Yield an empty folder to write into, and publish it as `tag` of `dir` when the block ends without an error.

    Then, if `keep` is given, all unnamed saves of its run but the newest `keep` are removed, and so is the replaced
    folder, unless it `stays` until `forget`. The block may end in another thread.

    Raises `StorageError` for errors of the file system, for another running save, for a folder under the tag that is
    not a save, and for a link in place of a folder. After any error, other tags and `latest` are unchanged, unless the
    error says that the save is in its place.
    """
    owner = os.getpid()
    with write_errors(dir):
        if dir.exists() and not dir.is_dir():
            raise StorageError("saves go into a directory", where=str(dir), got="a file", want="a directory or nothing")
        missing = [p for p in (dir, *dir.parents) if not p.exists()]
        dir.mkdir(parents=True, exist_ok=True)
        with _lock(dir):
            _clear(dir, stays)
            _check_replaceable(dir / tag)
            saving, new = dir / SAVING, unpublished(dir, tag)
            try:
                new.mkdir(parents=True)
                (saving / "old").mkdir(exist_ok=True)
                reports_folder(dir).mkdir()
                yield new
                with open(saving / LATEST, "xb") as file:
                    file.write(f"{tag}\n".encode())
                    file.flush()
                    os.fsync(file.fileno())
                sync(new)
                for created in missing:
                    sync(created.parent)
                before = latest_known(dir)
                _put_in_place(dir, tag, new)
                if keep is not None:
                    with contextlib.suppress(OSError):  # the next save tries again
                        _discard(dir, _outdated(dir, tag, keep, before))
            finally:
                if os.getpid() == owner:  # a forked process that closes its copy must not touch the save
                    with contextlib.suppress(OSError):  # the next save raises the error
                        _clear(dir, stays)


def forget(dir: Path, tag: str, keep: int | None) -> None:
    """Remove what `tag` replaced and, if `keep` is given, all unnamed saves of its run but the newest `keep`.

    Raises `StorageError`.
    """
    with write_errors(dir), _lock(dir):
        _clear(dir, stays=True)
        try:
            _discard(dir, _replaced(dir, tag) + ([] if keep is None else _outdated(dir, tag, keep)))
        finally:
            with contextlib.suppress(OSError):
                _clear(dir, stays=True)


def _put_in_place(dir: Path, tag: str, new: Path) -> None:
    if os.path.lexists(dir / tag):
        old = dir / SAVING / "old" / tag
        while old.exists():
            old = old.with_name(f"{old.name}~")
        os.rename(dir / tag, old)
    try:
        os.rename(new, dir / tag)
        sync(dir)
        os.replace(dir / SAVING / LATEST, dir / LATEST)
    except BaseException:  # after an error the earlier save is restored; Ctrl-C may come after any call
        if (dir / SAVING / LATEST).exists() and not new.exists():
            os.rename(dir / tag, new)
        raise
    try:
        sync(dir)
    except OSError as error:
        want, hint = "a directory whose names can be made durable", "save again, elsewhere if this disk is failing"
        raise refusal(
            "the save is in its place, but may not outlive a power failure", str(dir), str(error.strerror), want, hint
        ) from error


def _is_unnamed(tag: str) -> bool:
    return re.fullmatch(r"step\d{8,}", tag) is not None


def _outdated(dir: Path, tag: str, keep: int, before: str = "") -> list[Path]:
    """Return the folders of unnamed saves but this one and the newest others, of which `before` is the newest.

    Folders that cannot be read, hold other files than a save, or are of another run are left out.
    """
    ages, runs = dict[str, tuple[bool, str]](), (None, run_of(dir / tag))
    for other in filter(_is_unnamed, set(tags(dir)) - {tag}):
        with contextlib.suppress(StorageError):
            if not _not_a_save(dir / other) and (saved := read_manifest(dir / other)).run in runs:
                ages[other] = (other == before, saved.saved)
    dead = sorted(ages, key=ages.__getitem__)[: max(len(ages) + _is_unnamed(tag) - keep, 0)]
    return [folder for other in dead for folder in (*_replaced(dir, other), dir / other)]


def _discard(dir: Path, folders: list[Path]) -> None:
    """Move folders to where `_clear` removes them. Raises `OSError`."""
    dead = dir / SAVING / "dead"
    dead.mkdir(parents=True)
    for i, folder in enumerate(folders):
        os.rename(folder, dead / str(i))


def _replaced(dir: Path, tag: str = "*") -> list[Path]:
    """Return the folders in `.saving/old`, of one tag or all, the newest of each first."""
    folders = [path for path in dir.glob(f"{SAVING}/old/*") if path.is_dir() and not path.is_symlink()]
    folders = [path for path in folders if tag in ("*", path.name.rstrip("~"))]
    return sorted(folders, key=lambda path: len(path.name), reverse=True)


def _clear(dir: Path, stays: bool) -> None:
    """Remove what a save left behind; a tag that it had moved away and not replaced is restored.

    Replaced folders are removed too, unless `stays`. Raises `OSError`, and `StorageError` for a link.
    """
    saving = dir / SAVING
    for path in (saving, saving / "old"):
        if path.is_symlink():
            got = f"a link to {os.readlink(path)}"
            raise refusal("a link in place of a folder", str(path), got, "a folder or nothing", "remove the link")
    for old in _replaced(dir):
        if not os.path.lexists(place := dir / old.name.rstrip("~")):
            os.rename(old, place)
    kept = stays and bool(_replaced(dir))
    with contextlib.suppress(FileNotFoundError):
        if not kept:
            return shutil.rmtree(saving)
        for path in saving.iterdir():
            if path.name != "old":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def latest(dir: Path) -> str:
    """Return the tag that was saved last. Raises `OSError` and `UnicodeError`."""
    return read_small(dir / LATEST, 1000).decode().removesuffix("\n")


def latest_known(dir: Path) -> str:
    """Return the tag that was saved last, "" if that cannot be read."""
    with contextlib.suppress(OSError, UnicodeError):
        return latest(dir)
    return ""


def _latest(dir: Path, have: list[str]) -> str:
    try:
        return latest(dir)
    except (OSError, UnicodeError) as error:
        got, want = str(getattr(error, "strerror", error)), "one of " + ", ".join(map(repr, have))
        raise refusal(
            "it is not known which save is the last", str(dir / LATEST), got, want, f"load(..., tag={have[-1]!r})"
        ) from error


def _hint(dir: Path) -> str:
    if (dir / NAME).exists():
        return f"this is one save; load({str(dir.parent)!r}, ..., tag={dir.name!r})"
    below = [p.name for p in dir.iterdir() if p.is_dir() and tags(p)] if dir.is_dir() else []
    if below:
        return f"there are saves in {dir / below[0]}"
    return f"looked in {dir.absolute()}; fds storage show DIR lists the saves of a run's directory"


def _check_replaceable(folder: Path) -> None:
    if os.path.lexists(folder) and (unexpected := _not_a_save(folder)):
        where, want, hint = str(folder), f"nothing, or {NAME} and *.safetensors", "choose another tag"
        raise refusal("what exists under this tag is not a save, and is not replaced", where, unexpected, want, hint)


def _not_a_save(folder: Path) -> str:
    """Return what shows that a path is not a save, or holds other files than a save; "" for a save."""
    if folder.is_symlink() or not folder.is_dir():
        return "a file or a link"
    inside = sorted(os.listdir(folder))
    other = [name for name in inside if name != NAME and not name.endswith(".safetensors")]
    if NAME in inside and not other:
        return ""
    return ", ".join((other or inside)[:5]) or "an empty folder"


def _lock(dir: Path) -> contextlib.AbstractContextManager[None]:
    return hold_alone(lock_file(dir / LOCK), "save", dir, "give each run a directory of its own")


_runs: dict[str, str] = {}  # by directory, its links followed


def remembered_run(dir: Path) -> str | None:
    """Return the id of the run that this process began or loaded in a directory."""
    return _runs.get(os.path.realpath(dir))


def remember_run(dir: Path, run: str) -> None:
    """Go on with a run in a directory."""
    _runs[os.path.realpath(dir)] = run


def last_run(dir: Path) -> str | None:
    """Return the id of the run that saved last in a directory, None where there is none or an older version saved."""
    return run_of(dir / latest_known(dir))


def check_run_to_save(dir: Path, run: str) -> None:
    """Raise `StorageError` where the last save of a directory is of another run than the one that is to save."""
    if (other := last_run(dir)) not in (None, run):
        want = "the run that this process began or loaded here"
        hint = "fds.load from here first to go on with that run; else another directory, or take_over=True"
        raise refusal("another run has saved here", str(dir), _describe_run(dir / latest_known(dir), other), want, hint)


def check_run_to_load(dir: Path, folder: Path, run: str | None) -> None:
    """Raise `StorageError` for a save of another run than the one that this process goes on with in a directory."""
    mine = remembered_run(dir)
    if None not in (mine, run) and mine != run:
        raise StorageError(
            "this save is of another run than the one that this process began or loaded here",
            where=str(folder),
            got=_describe_run(folder, run),
            want=f"run {mine}",
            hint="give each run a directory of its own; take_over=True goes on with this one all the same",
        )


def _describe_run(folder: Path, run: str | None) -> str:
    with contextlib.suppress(StorageError):
        saved = read_manifest(folder)
        composed = ", ".join(saved.composition)
        return f"{folder.name} of run {run}, saved {saved.saved}, compose({composed:.200})"
    return f"{folder.name} of run {run}"
