"""The arena of a directory: all leaves of this process that live there, in one file.

The file has no name and is mapped into memory: it is gone with the process that opened it, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shlex
import tempfile
import threading
import weakref
from collections import deque

import attrs
from torch import Tensor

from fds.errors import DiskError, DiskFullError
from fds.media.locks import Lock, lock_directory
from fds.media.mapping import PAGE, Ranges, leaf_of, map_file, map_private, unmap

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_OFFSET = ctypes.c_int64
_FALLOCATE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, _OFFSET, _OFFSET, use_errno=True)(
    ("fallocate64", ctypes.CDLL(None, use_errno=True))
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_GROWS_NOT = "the file of the leaves cannot grow"


@attrs.define(eq=False)
class File:
    """An open file without a name, and its mapping, which reaches beyond its end."""

    directory: str  # in which it is
    fd: int  # its descriptor; -1 in a child process
    direct: bool  # whether reads and writes go past the page cache
    base: int  # the address of its first byte
    span: int  # the bytes that are mapped
    lock: Lock  # of the directory

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
            disk = os.fstatvfs(self.fd)
            kind, what = (DiskFullError, "the disk is full") if error.errno in _FULL else (DiskError, _GROWS_NOT)
            raise kind(
                what,
                where=self.directory,
                got=f"{error.strerror}; {disk.f_bavail * disk.f_frsize:,} bytes are free on this disk",
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

    def keep_in_child(self) -> None:
        """Let the child of a fork have a mapping of its own, whose writes do not reach its parent's leaves."""
        map_private(self.fd, self.base, self.span)
        os.close(self.fd)
        self.fd = -1


def open_file(directory: str) -> File:
    """Lock a directory and open a file in it. Raises `DiskError`."""
    try:
        with contextlib.ExitStack() as failing:
            lock = lock_directory(directory)
            failing.callback(lock.release)
            fd, direct = _open_nameless(directory)
            failing.callback(os.close, fd)
            disk = os.fstatvfs(fd)
            span = max(4 * disk.f_blocks * disk.f_frsize, 2**40)  # free ranges are taken again: none comes near
            file = File(directory, fd, direct, map_file(fd, span), span, lock)
            failing.pop_all()
            return file
    except OSError as error:
        got, want = str(error.strerror), "a directory of a local disk that this process may write to"
        raise DiskError("leaves cannot live in this directory", where=directory, got=got, want=want) from error


def _open_nameless(directory: str) -> tuple[int, bool]:
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
                start = self._allocate(nbytes)
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
        taken = self._size - self._free.nbytes - self._holes.nbytes
        if self._free.nbytes > max(taken, _KEEP):
            self._trim()

    def _trim(self) -> None:
        """Give the blocks that nobody holds back to the disk, where the file system can."""
        with contextlib.suppress(OSError):
            for start, nbytes in self._free:
                self.file.punch(start, nbytes)
                self._free.remove(start, nbytes)
                self._holes.give(start, nbytes)

    def _allocate(self, nbytes: int) -> int:
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
            about = os.stat(directory)
        except OSError as error:
            want = "a directory that is there"
            hint = f"mkdir -p {shlex.quote(directory)}, on the drive that is to hold them"
            raise DiskError(
                "leaves cannot live in this directory", where=directory, got=str(error.strerror), want=want, hint=hint
            ) from error
        arena = _arenas.get((about.st_dev, about.st_ino))
        if arena is None:
            arena = _arenas[about.st_dev, about.st_ino] = Arena(open_file(directory))
        return arena


def keep_in_child() -> None:
    """Let the child of a fork keep the values of leaves, and leave the files to its parent."""
    global _opening
    _opening = threading.Lock()
    for arena in _arenas.values():
        arena.file.keep_in_child()
    _arenas.clear()


@attrs.frozen(eq=False)
class Extent:
    """Where the values of a leaf on disk lie, for as long as the tensor that it was asked of lives.

    Values that were written through the tensor itself may be in the page cache of the file only, as for any file.

    Attributes:
        fd: the descriptor of the file, open for reading and writing with O_DIRECT where the file system can.
        offset: of the first byte.
        nbytes: how many.
    """

    fd: int
    offset: int
    nbytes: int


def extent_of(x: Tensor) -> Extent | None:
    """Return where the values of a contiguous tensor lie on disk; None if they lie elsewhere."""
    leaf = leaf_of(x)
    if leaf is None or not isinstance(leaf.place, Arena) or not x.is_contiguous():
        return None
    return Extent(leaf.place.file.fd, x.data_ptr() - leaf.place.file.base, x.nbytes)
