"""Folders: tags, `latest`, and how a new tag appears whole or not at all.

A save writes everything below `dir/.saving`, durably, and only then renames: the tag that it replaces into
`.saving/old`, its own into place, `latest` last. Each rename is atomic, so whoever is killed leaves a directory in
which the last complete save is found: at its place, or, between the first two renames, in `.saving/old`. Tags that
are no longer kept go last, when the newer one is there to stay. Where ranks have a directory each, what one of them
has replaced stays in `.saving/old` until all have the new tag: as `TAG`, then `TAG~`, `TAG~~`, the newest the longest.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from fds.errors import StorageError, did_you_mean
from fds.storage.disk.locks import lock_file
from fds.storage.disk.small import read_small
from fds.storage.format import manifest

LATEST, SAVING, LOCK = "latest", ".saving", ".lock"


def checked_tag(tag: object) -> str:
    """Return `tag` if it can name a folder inside the run's. Raises `StorageError`."""
    if not isinstance(tag, str) or not re.fullmatch(r"\w[\w.+=,@-]*", tag) or tag.lower() == LATEST:
        raise StorageError("not a tag", where="tag", got=repr(tag)[:80], want=f"letters, digits and any of _.+=,@- "
                           f"after the first, and not {LATEST!r}")  # fmt: skip
    return tag


def tags(dir: Path) -> list[str]:
    """Return the tags that can be loaded from a run's directory, sorted."""
    found = [*dir.glob(f"*/{manifest.NAME}"), *dir.glob(f"{SAVING}/old/*/{manifest.NAME}")]
    return sorted({path.parent.name.rstrip("~") for path in found if not path.parent.name.startswith(".")})


def versions(dir: Path, tag: str) -> list[Path]:
    """Return the folders of a tag that can be loaded, the newest first: several where not all ranks replaced it."""
    return [path for path in (dir / tag, *_replaced(dir, tag)) if (path / manifest.NAME).exists()]


def find(dir: Path, tag: str | None) -> Path:
    """Return the folder of a tag, or of the one saved last. Raises `StorageError` that says what there is."""
    known = tags(dir) if dir.is_dir() else []
    if not known:
        raise StorageError("there is no save here", where=str(dir), want="a directory that fds.save wrote",
                           got="nothing" if not dir.exists() else "a directory" if dir.is_dir() else "a file",
                           hint=_near(dir))  # fmt: skip
    where = dir if tag is not None else dir / LATEST
    tag = _latest(dir, known) if tag is None else tag
    if tag not in known:
        raise StorageError(
            "there is no save under this tag", where=str(where), got=repr(tag)[:80],
            want="one of " + ", ".join(map(repr, known)), hint=did_you_mean(str(tag), known),
        )  # fmt: skip
    return versions(dir, tag)[0]


def unpublished(dir: Path, tag: str) -> Path:
    """Return the folder into which a tag is written before it is published."""
    return dir / SAVING / "new" / tag


def told(dir: Path) -> Path:
    """Return the folder in which the ranks of a save tell the first one that they are done."""
    return dir / SAVING / "told"


@contextlib.contextmanager
def publish(dir: Path, tag: str, keep: int | None = None, *, stays: bool = False) -> Iterator[Path]:
    """Give an empty folder to write into, and make it the tag `tag` of `dir` when the block ends without an error.

    Then, if `keep` is given, all tags but the newest `keep` are removed. What is replaced goes, too, unless it `stays`
    until `forget`. The block may end in another thread.

    Raises `StorageError` for whatever the file system refuses, for another save that is running here, and for a
    folder in the tag's place that is no save, or a link in the place of a folder. After any error, other tags and
    `latest` are as they were, unless the error says that the save is in its place.
    """
    owner = os.getpid()
    with refusing(dir):
        if dir.exists() and not dir.is_dir():
            raise StorageError("saves go into a directory", where=str(dir), got="a file", want="a directory or nothing")
        missing = [p for p in (dir, *dir.parents) if not p.exists()]
        dir.mkdir(parents=True, exist_ok=True)
        with _locked(dir):
            _clear(dir, stays)
            _refuse_foreign(dir / tag)
            saving, new = dir / SAVING, unpublished(dir, tag)
            try:
                new.mkdir(parents=True)
                (saving / "old").mkdir(exist_ok=True)
                told(dir).mkdir()
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
                if os.getpid() == owner:  # a forked process that lets go of its copy leaves the save alone
                    with contextlib.suppress(OSError):  # the next save says why
                        _clear(dir, stays)


def forget(dir: Path, tag: str, keep: int | None) -> None:
    """Remove what `tag` replaced and, if `keep` is given, all tags but the newest `keep`, of which `tag` is one.

    Raises `StorageError`.
    """
    with refusing(dir), _locked(dir):
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
    except BaseException:  # who is told of an error finds what was there before; a key may be pressed after any request
        if (dir / SAVING / LATEST).exists() and not new.exists():
            os.rename(dir / tag, new)
        raise
    try:
        sync(dir)
    except OSError as error:
        raise StorageError(
            "the save is in its place, but may not outlive a power failure", where=str(dir), got=str(error.strerror),
            want="a directory whose names can be made durable", hint="save again, elsewhere if this disk is failing",
        ) from error  # fmt: skip


def _outdated(dir: Path, tag: str, keep: int, before: str = "") -> list[Path]:
    """Return the folders of all tags but this one and the newest others, of which that `before` it is the newest.

    What cannot be read, or holds more than a save, is nobody's to remove.
    """
    ages = dict[str, tuple[bool, str]]()
    for other in set(tags(dir)) - {tag}:
        with contextlib.suppress(StorageError):
            if not _strange(dir / other):
                ages[other] = (other == before, manifest.read_manifest(dir / other).saved)
    dead = sorted(ages, key=ages.__getitem__)[: max(len(ages) + 1 - keep, 0)]
    return [folder for other in dead for folder in (*_replaced(dir, other), dir / other)]


def _discard(dir: Path, folders: list[Path]) -> None:
    """Move folders out of the way, to be cleared. Raises `OSError`."""
    dead = dir / SAVING / "dead"
    dead.mkdir(parents=True)
    for i, folder in enumerate(folders):
        os.rename(folder, dead / str(i))


def _replaced(dir: Path, tag: str = "*") -> list[Path]:
    """Return the folders in `.saving/old`, of one tag or all, the newest of each first."""
    found = [path for path in dir.glob(f"{SAVING}/old/*") if path.is_dir() and not path.is_symlink()]
    found = [path for path in found if tag in ("*", path.name.rstrip("~"))]
    return sorted(found, key=lambda path: len(path.name), reverse=True)


def _clear(dir: Path, stays: bool) -> None:
    """Remove what a save left behind; a tag that it had moved away and not replaced returns to its place.

    What has been replaced goes with it, unless it `stays`. Raises `OSError`, and `StorageError` for a link.
    """
    saving = dir / SAVING
    for path in (saving, saving / "old"):
        if path.is_symlink():
            raise StorageError("a link in the place of a folder", where=str(path), got=f"a link to {os.readlink(path)}",
                               want="a folder or nothing", hint="remove the link")  # fmt: skip
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
    """Return the tag that was saved last, empty where that cannot be read."""
    with contextlib.suppress(OSError, UnicodeError):
        return latest(dir)
    return ""


def _latest(dir: Path, known: list[str]) -> str:
    try:
        return latest(dir)
    except (OSError, UnicodeError) as error:
        raise StorageError(
            "it is not known which save is the last", where=str(dir / LATEST),
            got=str(getattr(error, "strerror", error)), want="one of " + ", ".join(map(repr, known)),
            hint=f"load(..., tag={known[-1]!r})",
        ) from error  # fmt: skip


def _near(dir: Path) -> str:
    """Guess at what was meant: a tag's own folder, or its parent's."""
    if (dir / manifest.NAME).exists():
        return f"this is one save; load({str(dir.parent)!r}, ..., tag={dir.name!r})"
    below = [p.name for p in dir.iterdir() if p.is_dir() and tags(p)] if dir.is_dir() else []
    return f"there are saves in {dir / below[0]}" if below else ""


def _refuse_foreign(folder: Path) -> None:
    """Refuse to replace what is not a save: someone's file, or a folder with more in it than saves have."""
    if os.path.lexists(folder) and (strange := _strange(folder)):
        raise StorageError(
            "what is in the place of this tag is no save, and is not replaced", where=str(folder), got=strange,
            want=f"nothing, or {manifest.NAME} and *.safetensors", hint="choose another tag",
        )  # fmt: skip


def _strange(folder: Path) -> str:
    """Return what makes a folder no save, or one with more in it than saves have; nothing for a save."""
    if folder.is_symlink() or not folder.is_dir():
        return "a file or a link"
    inside = sorted(os.listdir(folder))
    other = [name for name in inside if name != manifest.NAME and not name.endswith(".safetensors")]
    if manifest.NAME in inside and not other:
        return ""
    return ", ".join((other or inside)[:5]) or "an empty folder"


@contextlib.contextmanager
def _locked(dir: Path) -> Iterator[None]:
    """Hold the lock of a run's directory."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(lock_file(dir / LOCK))
        except BlockingIOError:
            raise StorageError("another save is writing here", where=str(dir), want="one save at a time",
                               hint="give each run a directory of its own") from None  # fmt: skip
        yield


@contextlib.contextmanager
def refusing(dir: Path, work: str = "save") -> Iterator[None]:
    """Turn what the file system refuses inside the block into `StorageError`."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the file system refuses this {work}", where=str(error.filename or dir), got=str(error.strerror or error),
            want=f"a directory that can be written: {dir}", hint="what was there is as it was",
        ) from error  # fmt: skip


def sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
