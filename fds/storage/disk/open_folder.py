"""Folders that stay open, so that all is read from one save even if another replaces it meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import attrs

from fds.errors import StorageError


@attrs.define(eq=False)
class OpenFolder:
    """An open folder. It is closed by `close`, or when it is garbage-collected.

    Attributes:
        path: where it was opened, for messages.
        fd: its descriptor; -1 when it is closed.
    """

    path: Path
    fd: int

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
