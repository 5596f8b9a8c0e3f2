"""Files without a name, mapped into memory: gone with the process that opened them, however it ends."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import tempfile

import attrs

from fds.errors import DiskError, DiskFullError
from fds.media.locks import Lock, locked
from fds.media.mapping import map_file, map_private, unmap

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_OFFSET = ctypes.c_int64
_FALLOCATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, _OFFSET, _OFFSET, use_errno=True)(
    ("fallocate64", ctypes.CDLL(None, use_errno=True))
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GROWS_NOT = "the file of the leaves cannot grow"


@attrs.define(eq=False)
class File:
    """An open file without a name, and its mapping, which reaches beyond its end.

    Attributes:
        directory: in which it is.
        fd: its descriptor; -1 in a child process.
        direct: whether reads and writes go past the page cache.
        base: the address of its first byte.
        span: the bytes that are mapped.
        lock: of the directory.
    """

    directory: str
    fd: int
    direct: bool
    base: int
    span: int
    lock: Lock

    def allocate(self, start: int, nbytes: int) -> None:
        """Give a range blocks of the disk, so that no write to it can fail for want of space. Raises `DiskError`."""
        size = os.fstat(self.fd).st_size
        try:
            os.posix_fallocate(self.fd, start, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):  # give back what it got before it failed
                self.punch(start, nbytes)
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, size)
            found = os.fstatvfs(self.fd)
            kind, what = (DiskFullError, "the disk is full") if error.errno in _FULL else (DiskError, _GROWS_NOT)
            raise kind(
                what,
                where=self.directory,
                got=f"{error.strerror}; {found.f_bavail * found.f_frsize:,} bytes are free on this disk",
                want=f"{nbytes:,} bytes more",
                hint="free some, or let fewer leaves live here",
            ) from error

    def punch(self, start: int, nbytes: int) -> None:
        """Give the blocks of a range back to the disk. Raises `OSError` where the file system cannot."""
        if _FALLOCATE(self.fd, _PUNCH_HOLE | _KEEP_SIZE, start, nbytes):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), self.directory)

    def close(self) -> None:
        """Give everything back."""
        unmap(self.base, self.span)
        if self.fd >= 0:
            os.close(self.fd)

    def forked(self) -> None:
        """Let the child of a fork have a mapping of its own, whose writes do not reach its parent's leaves."""
        map_private(self.fd, self.base, self.span)
        os.close(self.fd)
        self.fd = -1
        self.lock.release()


def opened(directory: str) -> File:
    """Lock a directory and open a file in it. Raises `DiskError`."""
    try:
        lock = locked(directory)
        try:
            fd, direct = _nameless(directory)
            try:
                found = os.fstatvfs(fd)
                span = max(4 * found.f_blocks * found.f_frsize, 2**40)  # free ranges are taken again: none comes near
                return File(directory, fd, direct, map_file(fd, span), span, lock)
            except BaseException:
                os.close(fd)
                raise
        except BaseException:
            lock.release()
            raise
    except OSError as error:
        raise DiskError(
            "leaves cannot live in this directory",
            where=directory,
            got=str(error.strerror),
            want="a directory of a local disk that this process may write to",
        ) from error


def _nameless(directory: str) -> tuple[int, bool]:
    """Return the descriptor of a new file, and whether it is open for direct I/O. Raises `OSError`."""
    try:
        fd = os.open(directory, os.O_RDWR | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # the file system's no, the kernel's
            raise
        fd, path = tempfile.mkstemp(prefix=".fds.", dir=directory)
        os.unlink(path)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDWR | os.O_DIRECT)
    except OSError:
        return fd, False
    return fd, True
