"""Locks: held by one process, and freed by the kernel when it dies, whichever processes it has forked."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from fds.storage.disk.small import open_ordinary

_held: set[int] = set()  # descriptors: a lock is free when the last process with a copy of its own has closed it


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold the lock of an ordinary file, made if it is missing; a file system without locks is passed over.

    Raises `BlockingIOError` if another holds it, `OSError` for a link or anything else in the file's place.
    """
    with locked(open_ordinary(path, os.O_RDWR | os.O_CREAT)):
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
        if os.getpid() == owner:  # in a forked process it is closed, and the number may be another file's
            _held.discard(fd)
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a process that is about to start another program has a copy
            with contextlib.suppress(OSError):
                os.close(fd)


def _close_in_child() -> None:
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
