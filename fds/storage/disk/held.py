"""Held: a folder that stays open, so that what is read in it is of one save, whatever takes its name meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import attrs

from fds.errors import StorageError


@attrs.define(eq=False)
class Held:
    """An open folder. It is closed by `close`, or when nobody has it any more.

    Attributes:
        path: where it was when it was opened, for people and errors.
        fd: its descriptor; -1 when it is closed.
    """

    path: Path
    fd: int

    @classmethod
    def of(cls, path: Path) -> Held:
        """Open a folder. Raises `StorageError`."""
        try:
            return cls(path, os.open(path, os.O_RDONLY | os.O_DIRECTORY))
        except OSError as error:
            raise StorageError("a save's folder cannot be opened", where=str(path), got=str(error.strerror),
                               hint=hint(error)) from error  # fmt: skip

    def has(self, name: str) -> bool:
        """Return whether there is something of this name in the folder."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except OSError:
            return False
        return True

    def open(self, name: str) -> int:
        """Open what is in the folder under a plain name for reading. Raises `OSError`."""
        # NOFOLLOW: a link leads out of the folder. NONBLOCK: opening a pipe would wait for its writer.
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.fd)

    def close(self) -> None:
        """Close it; what was opened in it stays open."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()


def hint(error: OSError) -> str:
    """Return what may help where a save's folder or file cannot be opened."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many files are open: close some, or raise the limit (ulimit -n)"
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return "another save under this tag may have replaced it meanwhile: load again"
    return ""
