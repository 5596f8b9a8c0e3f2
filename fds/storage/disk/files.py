"""Files and folders that are read: paths of the user's, errors, small files, and folders that stay open."""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from fds.errors import StorageError, expanded
from fds.media.locks import open_regular


def refusal(what: str, where: str = "", got: str = "", want: str = "", hint: str = "") -> StorageError:
    """Return the error with these fields: in one line where it is raised."""
    return StorageError(what, where=where, got=got, want=want, hint=hint)


def check_path(path: object, where: str) -> Path:
    """Return the user's argument as a path. Raises `StorageError` for anything that is not a valid path."""
    with contextlib.suppress(TypeError, ValueError):  # paths of bytes, and strings that cannot be encoded
        if isinstance(path, str | os.PathLike) and b"\0" not in os.fsencode(result := Path(expanded(path))):
            return result
    raise StorageError("not a path", where=where, got=repr(path)[:80], want="text or a pathlib.Path")


def read_errors(work: str, path: str | os.PathLike[str] = "") -> contextlib.AbstractContextManager[None]:
    """Turn an `OSError` inside the block, such as for another user's files, into a `StorageError`."""
    return _refuse(work, path, "folders and files that this user may read")


def write_errors(dir: Path, work: str = "save") -> contextlib.AbstractContextManager[None]:
    """Turn an `OSError` inside the block into a `StorageError`."""
    return _refuse(work, dir, f"a directory that can be written: {dir}", "existing files are unchanged")


@contextlib.contextmanager
def _refuse(work: str, path: str | os.PathLike[str], want: str, hint: str = "") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where, got = str(error.filename or path), str(error.strerror or error)
        raise refusal(f"the file system refuses this {work}", where, got, want, hint) from error


@contextlib.contextmanager
def hold_alone(lock: contextlib.AbstractContextManager[None], work: str, dir: Path, hint: str = "") -> Iterator[None]:
    """Hold a lock. Raises `StorageError` if another process does `work` here, and so has it."""
    with contextlib.ExitStack() as locks:
        try:
            locks.enter_context(lock)
        except BlockingIOError:
            want = f"one {work} at a time"
            raise refusal(f"another {work} is writing here", str(dir), want=want, hint=hint) from None
        yield


def sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_small(path: str | Path, most: int, *, folder: int | None = None) -> bytes:
    """Return the bytes of a regular file of at most `most` bytes. Raises `OSError`."""
    with open(open_regular(path, os.O_RDONLY, folder=folder), "rb") as file:
        too_large = os.fstat(file.fileno()).st_size > most  # before memory is allocated
        content = b"" if too_large else file.read(most + 1)
    if too_large or len(content) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes", str(path))
    return content


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises `ValueError`, also for a repeated key in an object."""
    return json.loads(text, object_pairs_hook=unique_keys)


class RepeatedKeys(ValueError):
    """An object in a JSON text has `keys` (sorted) repeatedly, among its `count` pairs."""

    def __init__(self, keys: list[str], count: int):
        super().__init__("a key stands twice in one object")
        self.keys, self.count = keys, count


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, as an `object_pairs_hook`. Raises `RepeatedKeys` for a repeated key."""
    record = dict(pairs)
    if len(record) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        raise RepeatedKeys(sorted(name for name, count in counts.items() if count > 1), len(pairs))
    return record


@attrs.define(eq=False)
class OpenFolder:
    """An open folder. It is closed by `close`, or when it is garbage-collected."""

    path: Path  # where it was opened, for messages
    fd: int  # its descriptor; -1 when it is closed

    @classmethod
    def of(cls, path: Path) -> OpenFolder:
        """Open a folder. Raises `StorageError`."""
        try:
            return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            raise StorageError(
                "a save's folder cannot be opened", where=str(path), got=str(error.strerror), hint=hint(error)
            ) from error

    def has(self, name: str) -> bool:
        """Return whether the folder has an entry of this name."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def open(self, name: str) -> int:
        """Open a file in the folder for reading. Raises `OSError`."""
        # NOFOLLOW: a link leads out of the folder. NONBLOCK: opening a pipe would wait for its writer.
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.fd)

    def close(self) -> None:
        """Close the folder; files that were opened in it stay open."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


def hint(error: OSError) -> str:
    """Return a hint for an error of opening a save's folder or file."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many files are open: close some, or raise the limit (ulimit -n)"
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return "another save under this tag may have replaced it meanwhile: load again"
    return ""
