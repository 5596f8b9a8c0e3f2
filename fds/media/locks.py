"""Locks of files and folders, which the kernel releases when the process dies, even if it has forked others.

A lock is released when all processes have closed their copies of its descriptor; the child of a fork closes its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

from fds.collectives.worlds import process_rank
from fds.errors import DiskError

_PROCESS = "process "  # what the text in the lock of a directory begins with


@attrs.define(eq=False)
class Lock:
    """The lock of an open file or folder, to which it is closed."""

    fd: int  # its descriptor; -1 once it is closed
    # the device and inode of a file that it has, and other threads of this process may wait for
    file: tuple[int, int] | None = None
    removes: str | None = None  # the path of the file, if it is removed in the end

    def __attrs_post_init__(self) -> None:
        _locks.add(self)

    def take(self) -> None:
        """Lock it, without effect on a file system without locks. Raises `BlockingIOError` if another process has."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # a file system without locks

    def release(self) -> None:
        """Let go of it, and close it; without effect in the child of a fork, which has closed it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            if self.removes is not None:
                with contextlib.suppress(OSError):  # the next run locks the file that is there
                    os.unlink(self.removes)
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a process between fork and exec has a copy
            with contextlib.suppress(OSError):
                os.close(fd)
        _locks.discard(self)


_locks: set[Lock] = set()  # of this process


@contextlib.contextmanager
def hold_lock(fd: int) -> Iterator[None]:
    """Hold the lock of an open file or folder, and close it at the end. Raises `BlockingIOError`."""
    lock = Lock(fd)
    try:
        lock.take()
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold the lock of a regular file, created if it is missing; without effect on a file system without locks.

    Another user's, which may only be read, can still be locked. Raises `BlockingIOError` if another process holds it,
    `OSError` if the path is not a regular file.
    """
    with hold_lock(_open(path, 0o666)[0]):
        yield


def lock_directory(directory: str) -> Lock:
    """Lock a directory for the leaves of this rank; without effect on a file system without locks.

    A file that another user or program has there is locked as it is, and stays. Where this process has the lock, a
    thread is about to let go of it, for which this waits. Raises `DiskError` that names the holder where another
    process has it, `OSError` where the file cannot be made.
    """
    path = os.path.join(directory, f"fds.lock-{process_rank()}")
    while True:
        fd, can_write = _open(path, 0o644)
        lock = Lock(fd)
        try:
            if _take(lock, path) and _is_at(fd, path):  # whoever had it may have removed the file meanwhile
                if can_write and _is_ours(fd):
                    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{_PROCESS}{os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
                    lock.removes = path
                return lock
        except BaseException:
            lock.release()
            raise
        lock.release()


def open_regular(path: str | Path, flags: int, *, mode: int = 0o666, folder: int | None = None) -> int:
    """Return a descriptor of a regular file, without following links or blocking. Raises `OSError`.

    `path` is relative to `folder`, the descriptor of an open folder, if that is given.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def _open(path: str | Path, mode: int) -> tuple[int, bool]:
    """Return the descriptor of a lock, and whether it may be written, as another user's may not. Raises `OSError`."""
    try:
        return open_regular(path, os.O_RDWR | os.O_CREAT, mode=mode), True
    except PermissionError as error:
        try:
            return open_regular(path, os.O_RDONLY), False
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


def _take(lock: Lock, path: str) -> bool:
    """Take a lock, and return True; False where this process has it, after a while. Raises `DiskError`."""
    about = os.fstat(lock.fd)
    file = about.st_dev, about.st_ino
    try:
        lock.take()
    except BlockingIOError as error:
        if any(other.file == file for other in list(_locks)):
            time.sleep(0.001)
            return False
        raise DiskError(
            "another run has its leaves in this directory",
            where=path,
            got=f"locked by {_holder(lock.fd) or 'a process that did not write which'}",
            want="a directory of its own for every run",
            hint="end that process, or name another directory",
        ) from error
    lock.file = file  # from here on: a thread that only tries has nothing that another could wait for
    return True


def _is_at(fd: int, path: str) -> bool:
    """Return whether an open file is still the one that has this name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _close_in_child() -> None:
    for lock in _locks:
        with contextlib.suppress(OSError):
            os.close(lock.fd)
        lock.fd = -1
    _locks.clear()


os.register_at_fork(after_in_child=_close_in_child)
