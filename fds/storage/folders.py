"""Folders: tags, `latest`, and how a new tag appears whole or not at all.

A save writes everything below `dir/.saving`, durably, and only then renames: the tag that it replaces into
`.saving/old`, its own into place, `latest` last. Each rename is atomic, so whoever is killed leaves a directory in
which the last complete save is found: at its place, or, between the first two renames, in `.saving/old`. Tags that
are no longer kept go last, when the newer one is there to stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from fds.errors import StorageError, did_you_mean
from fds.storage import manifest

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
    return sorted({path.parent.name for path in found if not path.parent.name.startswith(".")})


def find(dir: Path, tag: str | None) -> Path:
    """Return the folder of a tag, or of the one saved last. Raises `StorageError` that says what there is."""
    known = tags(dir) if dir.is_dir() else []
    if not known:
        raise StorageError("there is no save here", where=str(dir), want="a directory that fds.save wrote",
                           got="nothing" if not dir.exists() else "a directory" if dir.is_dir() else "a file",
                           hint=_near(dir))  # fmt: skip
    where = dir if tag is not None else dir / LATEST
    tag = _latest(where, known) if tag is None else tag
    if tag not in known:
        raise StorageError(
            "there is no save under this tag", where=str(where), got=repr(tag)[:80],
            want="one of " + ", ".join(map(repr, known)), hint=did_you_mean(str(tag), known),
        )  # fmt: skip
    return dir / tag if (dir / tag).exists() else dir / SAVING / "old" / tag


def unpublished(dir: Path, tag: str) -> Path:
    """Return the folder into which a tag is written before it is published."""
    return dir / SAVING / "new" / tag


def told(dir: Path) -> Path:
    """Return the folder in which the ranks of a save tell the first one that they are done."""
    return dir / SAVING / "told"


@contextlib.contextmanager
def publish(dir: Path, tag: str, keep: int | None = None) -> Iterator[Path]:
    """Give an empty folder to write into, and make it the tag `tag` of `dir` when the block ends without an error.

    Then, if `keep` is given, all tags but the newest `keep` are removed. The block may end in another thread.

    Raises `StorageError` for whatever the file system refuses, for another save that is running here, and for a
    folder in the tag's place that is no save. After any error, other tags and `latest` are as they were.
    """
    with refusing(dir):
        if dir.exists() and not dir.is_dir():
            raise StorageError("saves go into a directory", where=str(dir), got="a file", want="a directory or nothing")
        missing = [p for p in (dir, *dir.parents) if not p.exists()]
        dir.mkdir(parents=True, exist_ok=True)
        with _locked(dir):
            _clear(dir)
            _refuse_foreign(dir / tag)
            saving, new = dir / SAVING, unpublished(dir, tag)
            try:
                new.mkdir(parents=True)
                (saving / "old").mkdir()
                told(dir).mkdir()
                yield new
                with open(saving / LATEST, "xb") as file:
                    file.write(f"{tag}\n".encode())
                    file.flush()
                    os.fsync(file.fileno())
                sync(new)
                for created in missing:
                    sync(created.parent)
                _put_in_place(dir, tag, new)
                if keep is not None:
                    with contextlib.suppress(OSError):  # the next save tries again
                        _forget(dir, tag, keep)
            finally:
                with contextlib.suppress(OSError):  # the next save says why
                    _clear(dir)


def forget(dir: Path, tag: str, keep: int) -> None:
    """Remove all tags but the newest `keep`, of which `tag` is one. Raises `StorageError`."""
    with refusing(dir), _locked(dir):
        try:
            (dir / SAVING).mkdir(exist_ok=True)
            _forget(dir, tag, keep)
        finally:
            with contextlib.suppress(OSError):
                _clear(dir)


def _put_in_place(dir: Path, tag: str, new: Path) -> None:
    if (dir / tag).exists():
        os.rename(dir / tag, dir / SAVING / "old" / tag)
    os.rename(new, dir / tag)
    try:
        sync(dir)
        os.replace(dir / SAVING / LATEST, dir / LATEST)
    except BaseException:
        os.rename(dir / tag, new)  # who is told of an error finds what was there before
        raise
    sync(dir)


def _forget(dir: Path, tag: str, keep: int) -> None:
    """Move all tags but this one and the newest others out of the way; what cannot be read is nobody's to remove."""
    ages = dict[str, str]()
    for other in set(tags(dir)) - {tag}:
        with contextlib.suppress(StorageError):
            ages[other] = manifest.read_manifest(dir / other).saved
    dead = dir / SAVING / "dead"
    dead.mkdir()
    for old in sorted(ages, key=ages.__getitem__)[: max(len(ages) + 1 - keep, 0)]:
        os.rename(dir / old, dead / old)


def _clear(dir: Path) -> None:
    """Remove what a save left behind; a tag that it had moved away and not replaced returns to its place.

    Raises `OSError`.
    """
    for old in dir.glob(f"{SAVING}/old/*"):
        if not (dir / old.name).exists():
            os.rename(old, dir / old.name)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(dir / SAVING)


def _latest(path: Path, known: list[str]) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(1000).removesuffix("\n")
    except (OSError, UnicodeError) as error:
        raise StorageError(
            "it is not known which save is the last", where=str(path), got=str(getattr(error, "strerror", error)),
            want="one of " + ", ".join(map(repr, known)), hint=f"load(..., tag={known[-1]!r})",
        ) from error  # fmt: skip


def _near(dir: Path) -> str:
    """Guess at what was meant: a tag's own folder, or its parent's."""
    if (dir / manifest.NAME).exists():
        return f"this is one save; load({str(dir.parent)!r}, ..., tag={dir.name!r})"
    below = [p.name for p in dir.iterdir() if p.is_dir() and tags(p)] if dir.is_dir() else []
    return f"there are saves in {dir / below[0]}" if below else ""


def _refuse_foreign(folder: Path) -> None:
    """Refuse to replace what is not a save: someone's file, or a folder with more in it than saves have."""
    if not folder.exists() and not folder.is_symlink():
        return
    inside = [p.name for p in folder.iterdir()] if folder.is_dir() and not folder.is_symlink() else []
    other = [name for name in inside if name != manifest.NAME and not name.endswith(".safetensors")]
    if manifest.NAME not in inside or other:
        raise StorageError(
            "what is in the place of this tag is no save, and is not replaced", where=str(folder),
            got=", ".join(sorted(other or inside)[:5]) or "a file or an empty folder",
            want=f"nothing, or {manifest.NAME} and *.safetensors", hint="choose another tag",
        )  # fmt: skip


@contextlib.contextmanager
def _locked(dir: Path) -> Iterator[None]:
    """Hold the lock of a run's directory; the kernel frees it when the process dies."""
    with open(dir / LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError("another save is writing here", where=str(dir), want="one save at a time",
                               hint="give each run a directory of its own") from None  # fmt: skip
        except OSError:
            pass  # a file system without locks
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # closing does not suffice where a child process shares the file


@contextlib.contextmanager
def refusing(dir: Path) -> Iterator[None]:
    """Turn what the file system refuses inside the block into `StorageError`."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            "the file system refuses this save", where=str(error.filename or dir), got=str(error.strerror or error),
            want=f"a directory that can be written: {dir}", hint="saves that were there are as they were",
        ) from error  # fmt: skip


def sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
