"""File locks that the kernel releases when the process dies, even if it has forked others."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from fds.storage.disk.small_files import open_regular

_held: set[int] = set()  # descriptors: a lock is released when all processes have closed their copies of its descriptor


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold the lock of a regular file, created if it is missing; without effect on a file system without locks.

    Another user's, which may only be read, can still be locked. Raises `BlockingIOError` if another process holds it,
    `OSError` if the path is not a regular file.
    """
    try:
        fd = open_regular(path, os.O_RDWR | os.O_CREAT)
    except PermissionError as error:
        try:
            fd = open_regular(path, os.O_RDONLY)
        except OSError:
            raise error from None
    with locked(fd):
        yield


@contextlib.contextmanager
def locked(fd: int) -> Iterator[None]:
    """Hold the lock of an open file or folder, and close it at the end. Raises `BlockingIOError`."""
    owner = os.getpid()
    _held.add(fd)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        if os.getpid() == owner:  # a forked process has closed it, and may have reused the number
            _held.discard(fd)
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a process between fork and exec has a copy
            with contextlib.suppress(OSError):
                os.close(fd)


def _close_in_child() -> None:
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
