"""Paths from the user, and errors of the file system when they are read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fds.errors import StorageError, expanded


def checked_path(path: object, where: str) -> Path:
    """Return the user's argument as a path. Raises `StorageError` for anything that is not a valid path."""
    with contextlib.suppress(TypeError, ValueError):  # paths of bytes, and strings that cannot be encoded
        if isinstance(path, str | os.PathLike) and b"\0" not in os.fsencode(found := Path(expanded(path))):
            return found
    raise StorageError("not a path", where=where, got=repr(path)[:80], want="text or a pathlib.Path")


@contextlib.contextmanager
def read_errors(work: str, path: str | os.PathLike[str] = "") -> Iterator[None]:
    """Turn an `OSError` inside the block, such as for another user's files, into a `StorageError`."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the file system refuses this {work}",
            where=str(error.filename or path),
            got=str(error.strerror or error),
            want="folders and files that this user may read",
        ) from error
