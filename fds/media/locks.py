"""The lock of a directory: leaves of one run at a time, a file for each of its ranks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time

import attrs

from fds.collectives.worlds import process_rank
from fds.errors import DiskError


@attrs.define(eq=False)
class Lock:
    """The lock of a directory. It ends with the process, however that ends."""

    path: str
    fd: int
    owner: int  # the process that took it
    file: tuple[int, int]  # the device and inode of its file
    written: bool  # whether the file is one of fds, which says who has it

    def release(self) -> None:
        """Let go of it. In a forked process, close the copy, with which it would outlive this process."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            if os.getpid() == self.owner and self.written:
                with contextlib.suppress(OSError):  # the next run locks the file that is there
                    os.unlink(self.path)
            os.close(fd)
            _own.discard(self)


_own: set[Lock] = set()  # of this process
_PROCESS = "process "  # what the text in a lock begins with


def locked(directory: str) -> Lock:
    """Lock a directory for this rank; without effect on a file system without locks.

    A file that another user or program has there is locked as it is, and stays. Where this process has the lock, a
    thread is about to let go of it, for which this waits. Raises `DiskError` that names the holder where another
    process has it, `OSError` where the file cannot be made.
    """
    path = os.path.join(directory, f"fds.lock-{process_rank()}")
    while True:
        fd, can_write = _open(path)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            file = found.st_dev, found.st_ino
            if _take(fd, path, file) and _is_at(fd, path):  # whoever had it may have removed the file meanwhile
                if written := can_write and _is_ours(fd):
                    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{_PROCESS}{os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
                lock = Lock(path, fd, os.getpid(), file, written)
                _own.add(lock)
                return lock
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _open(path: str) -> tuple[int, bool]:
    """Return the descriptor of a lock, and whether it may be written, as another user's may not. Raises `OSError`."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644), True
    except PermissionError as error:
        try:
            return os.open(path, os.O_RDONLY | flags), False
        except OSError:
            raise error from None


def _is_ours(fd: int) -> bool:
    """Return whether a file has one name, and holds what a lock does or nothing."""
    about = os.fstat(fd)
    return about.st_nlink == 1 and (not about.st_size or bool(_holder(fd)))


def _holder(fd: int) -> str:
    """Return what a lock says of the process that has it; empty for a file with other content."""
    text = os.pread(fd, 400, 0).decode(errors="replace")
    return text.strip() if text.startswith(_PROCESS) and text.find("\n") == len(text) - 1 else ""


def _take(fd: int, path: str, file: tuple[int, int]) -> bool:
    """Lock a file, and return True; False where this process has it, after a while. Raises `DiskError`."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        if any(one.file == file for one in list(_own)):
            time.sleep(0.001)
            return False
        raise DiskError(
            "another run has its leaves in this directory",
            where=path,
            got=f"locked by {_holder(fd) or 'a process that did not write which'}",
            want="a directory of its own for every run",
            hint="end that process, or name another directory",
        ) from error
    except OSError:
        pass  # a file system without locks
    return True


def _is_at(fd: int, path: str) -> bool:
    """Return whether an open file is still the one that has this name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
