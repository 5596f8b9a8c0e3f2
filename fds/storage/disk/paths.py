"""Paths: what the user gives as one, and what the file system does not let this user read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fds.errors import StorageError


def checked_path(path: object, where: str) -> Path:
    """Return what the user gave as a path. Raises `StorageError` for what no file can be called."""
    try:
        found = Path(path)  # type: ignore[arg-type]
        if b"\0" not in os.fsencode(found):
            return found
    except (TypeError, ValueError):  # text that is no Unicode among them
        pass
    raise StorageError("not a path", where=where, got=repr(path)[:80], want="text or a pathlib.Path")


@contextlib.contextmanager
def reading(work: str, path: str | os.PathLike = "") -> Iterator[None]:
    """Turn what the file system refuses inside the block, such as another user's files, into `StorageError`."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the file system refuses this {work}", where=str(error.filename or path), got=str(error.strerror or error),
            want="folders and files that this user may read",
        ) from error  # fmt: skip
