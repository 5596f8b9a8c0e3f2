"""Memory by address: mapped by mmap(2), seen as tensors, taken in ranges, and used again."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import os
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

PAGE = 4096  # bytes; what addresses, offsets and lengths of direct I/O are multiples of

_LIBC = ctypes.CDLL(None, use_errno=True)
_ADDRESS, _SIZE, _INT, _OFFSET = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
_MMAP = ctypes.CFUNCTYPE(_ADDRESS, _ADDRESS, _SIZE, _INT, _INT, _INT, _OFFSET, use_errno=True)(("mmap", _LIBC))
_MUNMAP = ctypes.CFUNCTYPE(_INT, _ADDRESS, _SIZE, use_errno=True)(("munmap", _LIBC))
_MADVISE = ctypes.CFUNCTYPE(_INT, _ADDRESS, _SIZE, _INT, use_errno=True)(("madvise", _LIBC))
_FIXED, _NORESERVE, _HUGEPAGE, _DONTNEED = 0x10, 0x4000, 14, 4
_FAILED = ctypes.c_void_p(-1).value


def pages(nbytes: int) -> int:
    """Return a number of bytes, rounded up to pages."""
    return -(-nbytes // PAGE) * PAGE


def map_file(fd: int, nbytes: int) -> int:
    """Map a file, readable and writable, shared with it; also beyond its end, where it may grow. Raises `OSError`."""
    return _map(None, nbytes, mmap.MAP_SHARED | _NORESERVE, fd)


def map_private(fd: int, address: int, nbytes: int) -> None:
    """Map a file over what is mapped there, so that writes reach nobody else. Raises `OSError`."""
    _map(address, nbytes, mmap.MAP_PRIVATE | _NORESERVE | _FIXED, fd)


def map_memory(nbytes: int) -> int:
    """Map fresh memory, of large pages where the system gives them; it is taken as it is touched. Raises `OSError`."""
    address = _map(None, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)
    _MADVISE(address, nbytes, _HUGEPAGE)
    return address


def unmap(address: int, nbytes: int) -> None:
    """Give mapped memory back."""
    _MUNMAP(address, nbytes)


def drop(address: int, nbytes: int) -> None:
    """Let go of what was read of a mapped file through the mapping; that which was written stays in the page cache."""
    _MADVISE(address, nbytes, _DONTNEED)


def _map(address: int | None, nbytes: int, flags: int, fd: int) -> int:
    mapped = _MMAP(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if mapped is None or mapped == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return mapped


@attrs.define(eq=False)
class Leaf:
    """What is known of a storage that a medium made."""

    medium: Any  # a Medium
    place: Any = None  # of the medium's own
    copied: tuple[Any, int] | None = None  # an event after its last copy from or to a GPU, and of which process
    checksums: dict[tuple[int, int], int] = attrs.field(factory=dict)  # of its bytes from .. to, as last written
    in_place: bool = False  # whether it is written through the mapping, which no checksum follows

    def wrote(self, start: int, end: int) -> None:
        """Forget the checksums of what lies in these bytes, which are being written."""
        for span in [(a, b) for a, b in list(self.checksums) if a < end and start < b]:
            self.checksums.pop(span, None)


leaves: dict[int, Leaf] = {}  # by the address of their storage, while it lives; empty ones have no memory

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_WRITABLE = 0x200  # PyBUF_WRITE


def leaf_of(x: Tensor) -> Leaf | None:
    """Return what is known of the storage of a tensor; None if no medium made it."""
    return leaves.get(x.untyped_storage().data_ptr()) if leaves and x.device.type == "cpu" else None


def written_in_place(x: Tensor) -> Tensor:
    """Note that a leaf is written through its memory, and return it."""
    if (leaf := leaf_of(x)) is not None:
        leaf.in_place = True
    return x


def view(address: int, nbytes: int) -> memoryview:
    """Return memory as bytes. Nothing holds it: whoever uses the view does."""
    return _view(address, nbytes, _WRITABLE)


def own(address: int, nbytes: int, freed: Callable[..., object], *args: Any) -> memoryview:
    """Return memory as bytes; `freed(*args)` is called when the view, and all tensors over it, are gone.

    It may be called in any thread, between any two instructions.
    """
    owner = view(address, nbytes)
    weakref.finalize(owner, freed, *args).atexit = False
    return owner


def over(owner: memoryview, like: Tensor, offset: int = 0) -> Tensor:
    """Return a contiguous tensor of the shape and dtype of `like`, which is not read, over memory; a storage alone."""
    with torch.inference_mode(False):
        flat = torch.frombuffer(owner, dtype=like.dtype, count=math.prod(like.shape), offset=offset)
        return flat.resize_(like.shape)  # and not `view`, which would hold the storage once more


def nbytes_of(like: Tensor) -> int:
    """Return the bytes that a contiguous tensor of this shape and dtype takes."""
    return math.prod(like.shape) * like.element_size()


@attrs.define(eq=False)
class Ranges:
    """Ranges that are free, sorted, no two of them adjacent."""

    nbytes: int = 0  # how many are free in all
    last: int = 0  # the end of the range that was taken last: what is taken together lies together
    _starts: list[int] = attrs.field(factory=list)
    _ends: list[int] = attrs.field(factory=list)

    def take(self, nbytes: int) -> int | None:
        """Take a range and return its start: behind the last one, else of the smallest that is large enough."""
        i = bisect_left(self._starts, self.last)
        if not (i < len(self._starts) and self._starts[i] == self.last and self._ends[i] - self.last >= nbytes):
            free = [(end - start, start) for start, end in zip(self._starts, self._ends, strict=True)]
            best = min((size for size in free if size[0] >= nbytes), default=None)
            if best is None:
                return None
            i = bisect_left(self._starts, best[1])
        start = self._starts[i]
        self._cut(i, start + nbytes)
        self.last = start + nbytes
        return start

    def give(self, start: int, nbytes: int) -> None:
        """Give a range back, or add a new one."""
        i, end = bisect_left(self._starts, start), start + nbytes
        self.nbytes += nbytes
        if i < len(self._starts) and self._starts[i] == end:
            end = self._ends[i]
            del self._starts[i], self._ends[i]
        if i and self._ends[i - 1] == start:
            self._ends[i - 1] = end
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)

    def remove(self, start: int, nbytes: int) -> None:
        """Take a whole range of those that `__iter__` yields."""
        self._cut(bisect_left(self._starts, start), start + nbytes)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the start and the bytes of every range; ranges may be removed meanwhile."""
        return iter([(start, end - start) for start, end in zip(self._starts, self._ends, strict=True)])

    def _cut(self, i: int, start: int) -> None:
        """Let a range begin at `start`, if anything is left of it."""
        self.nbytes -= start - self._starts[i]
        self._starts[i] = start
        if start == self._ends[i]:
            del self._starts[i], self._ends[i]


Slots = list[tuple[memoryview, int]]  # for every size that was asked for, memory and the offset in it


class Buffers:
    """Room for `count` requests of `nbytes` at once, taken from the system as it is first used.

    A request that is larger than `nbytes` makes room for as many of its size.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self._count = count
        self._slab = _Slab(count * nbytes)
        self._lock = threading.Lock()

    def take(self, sizes: list[int]) -> Slots | None:
        """Return memory of sizes in whole pages, side by side where that fits; None where too much is held."""
        with self._lock:
            if (nbytes := sum(sizes) * self._count) > self._slab.nbytes:
                self._slab = _Slab(nbytes)  # the old one is unmapped with the last that is held of it
            return self._slab.take(sizes)


class _Slab:
    """Memory of which ranges are taken."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._base = map_memory(nbytes)
        self._ranges = Ranges()
        self._ranges.give(0, nbytes)
        self._dropped: deque[tuple[int, int]] = deque()
        weakref.finalize(self, unmap, self._base, nbytes).atexit = False

    def take(self, sizes: list[int]) -> Slots | None:
        while self._dropped:
            self._ranges.give(*self._dropped.popleft())
        if not sizes:
            return []
        if (whole := self._own(sum(sizes))) is not None:
            return _side_by_side(whole, sizes)
        owners = [self._own(nbytes) for nbytes in sizes]
        return None if None in owners else [(owner, 0) for owner in owners if owner is not None]

    def _own(self, nbytes: int) -> memoryview | None:
        start = self._ranges.take(nbytes)
        return None if start is None else own(self._base + start, nbytes, self._give, start, nbytes)

    def _give(self, start: int, nbytes: int) -> None:
        self._dropped.append((start, nbytes))


def map_slots(sizes: list[int]) -> Slots:
    """Return memory of sizes in whole pages that is given back to the system when nobody holds it."""
    nbytes = sum(sizes)
    address = map_memory(nbytes)
    owner = own(address, nbytes, unmap, address, nbytes)
    return _side_by_side(owner, sizes)


def _side_by_side(owner: memoryview, sizes: list[int]) -> Slots:
    return [(owner, end - nbytes) for end, nbytes in zip(itertools.accumulate(sizes), sizes, strict=True)]
