"""The arena of a directory: all leaves of this process that live there, in one file."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import weakref
from collections import deque

from fds.errors import DiskError
from fds.media.files import File, opened
from fds.media.mapping import PAGE
from fds.media.ranges import Ranges

_GROW = 2**20, 2**26  # bytes by which the file grows at least, and at most where less is needed
_KEEP = 2**32  # bytes that stay allocated though nobody holds them: a write to new blocks takes 1.6 times as long


class Arena:
    """Extents of a file: taken for leaves, given back when they die, taken again by others.

    When the last leaf is gone, and the last `Disk` that opened it, so is the file.
    """

    def __init__(self, file: File) -> None:
        self.file = file
        self._size = 0  # up to here the file was allocated
        self._free = Ranges()  # allocated, and held by nobody
        self._holes = Ranges()  # given back to the disk
        self._lock = threading.Lock()
        self._dropped: deque[tuple[int, int]] = deque()  # address and bytes, not yet in `_free`
        weakref.finalize(self, file.close).atexit = False  # leaves may be read until the process ends
        weakref.finalize(self, file.lock.release)

    def take(self, nbytes: int) -> int:
        """Return the address of a free extent of whole pages. Raises `DiskError` where the disk is full."""
        with self._lock:
            self._collect()
            start = self._free.take(nbytes)
            if start is None:
                start = self._allocated(nbytes)
        return self.file.base + start

    def give(self, address: int, nbytes: int) -> None:
        """Give an extent back: in any thread, between any two instructions."""
        if self.file.fd < 0:  # the parent's
            return
        self._dropped.append((address - self.file.base, nbytes))
        while self._dropped and self._lock.acquire(blocking=False):  # else whoever has it collects, now or next time
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._dropped:
            self._free.give(*self._dropped.popleft())
        held = self._size - self._free.nbytes - self._holes.nbytes
        if self._free.nbytes > max(held, _KEEP):
            self._trim()

    def _trim(self) -> None:
        """Give the blocks that nobody holds back to the disk, where the file system can."""
        with contextlib.suppress(OSError):
            for start, nbytes in self._free:
                self.file.punch(start, nbytes)
                self._free.remove(start, nbytes)
                self._holes.give(start, nbytes)

    def _allocated(self, nbytes: int) -> int:
        """Return the start of an extent that was in a hole, or behind the end."""
        if (start := self._holes.take(nbytes)) is not None:
            try:
                try:
                    self.file.allocate(start, nbytes)
                except DiskError:
                    self._trim()
                    self.file.allocate(start, nbytes)
            except BaseException:
                self._holes.give(start, nbytes)
                raise
            return start
        grown = max(nbytes, min(max(self._size // 8, _GROW[0]), _GROW[1])) // PAGE * PAGE
        try:
            self.file.allocate(self._size, grown)
        except DiskError:
            self._trim()
            self.file.allocate(self._size, grown := nbytes)
        start, self._size = self._size, self._size + grown
        if grown > nbytes:
            self._free.give(start + nbytes, grown - nbytes)
            self._free.last = start + nbytes
        return start


_arenas: weakref.WeakValueDictionary[tuple[int, int], Arena] = weakref.WeakValueDictionary()  # by device and inode
_opening = threading.Lock()


def arena_of(directory: str) -> Arena:
    """Return the arena of a directory, for whose leaves there is one in this process. Raises `DiskError`."""
    with _opening:
        try:
            found = os.stat(directory)
        except OSError as error:
            raise DiskError(
                "leaves cannot live in this directory",
                where=directory,
                got=str(error.strerror),
                want="a directory that is there",
                hint=f"mkdir -p {shlex.quote(directory)}, on the drive that is to hold them",
            ) from error
        arena = _arenas.get((found.st_dev, found.st_ino))
        if arena is None:
            arena = _arenas[found.st_dev, found.st_ino] = Arena(opened(directory))
        return arena


def forked() -> None:
    """Let the child of a fork keep the values of leaves, and leave the files to its parent."""
    global _opening
    _opening = threading.Lock()
    for arena in _arenas.values():
        arena.file.forked()
    _arenas.clear()
