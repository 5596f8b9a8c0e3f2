"""Memory that a step writes its results into: who else holds it, and the pool from which a pure step takes it."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence

import attrs
import torch
from torch import Tensor

from fds import reading, tree
from fds.autodiff import storage_counts
from fds.layout import Bucket
from fds.step import foreach

Make = Callable[[int, Tensor], Tensor]


@functools.cache
def keep_heap() -> None:
    """Let malloc keep the memory that every step gives back and takes again, for the whole process; once.

    From the first block of 32 MiB that is freed glibc learns that such sizes come again (mallopt(3), the dynamic
    M_MMAP_THRESHOLD), and gives less of its heap back. This one is never touched, so it costs nothing. A pipeline of
    two stages by ZB-H1 took 25,000 page faults and 1510 ms a step without, 5 and 1270 with it. Elsewhere it does
    nothing.
    """
    libc = ctypes.CDLL(None)
    malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", libc))
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("free", libc))
    free(malloc(2**25 - 2**13))


# private: torch has no public function that says how many tensors of C++ share a storage
_times_held: Callable[[int], int] = torch._C._storage_Use_Count  # pyright: ignore[reportPrivateUsage]


@attrs.frozen(eq=False)
class Buffers:
    """Many contiguous tensors as 1-D tensors, and whether anybody else holds the memory of some.

    The counters of all are read at once by `map`, 0.1 us a tensor.
    """

    flat: list[Tensor]
    storages: list[torch.UntypedStorage]
    handles: list[int]  # of the storages, for `_storage_Use_Count`

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Buffers:
        """Return the buffers of tensors, which stay alive elsewhere."""
        flat = [x.view(-1) for x in tensors]
        storages = list(map(Tensor.untyped_storage, flat))
        return cls(flat, storages, [s._cdata for s in storages])  # pyright: ignore[reportPrivateUsage]  (see `counts`)

    def counts(self) -> tuple[list[int], list[int], list[int]]:
        """Return how often every storage is held, by C++ and by Python, and every flat tensor."""
        by_cpp = map(_times_held, self.handles)
        return list(by_cpp), list(map(sys.getrefcount, self.storages)), list(map(sys.getrefcount, self.flat))

    def shared(self, others: int = 0) -> list[bool]:
        """Say of every tensor whether more hold its memory than the tensor, these buffers and `others` tensors."""
        counts, alone = self.counts(), (_ALONE[0] + others, *_ALONE[1:])
        if all(numbers.count(least) == len(numbers) for numbers, least in zip(counts, alone, strict=True)):
            return [False] * len(self.flat)
        return [count != alone for count in zip(*counts, strict=True)]


_SAMPLE = torch.empty(1, device="cpu")
_ALONE = tuple(count for (count,) in Buffers.of([_SAMPLE]).counts())  # (3, 3, 2) in torch 2.13


@attrs.define(eq=False)
class Scratch:
    """Memory that one step after another takes, and the views of it that they need.

    To cut a bucket anew costs 1.5 us a parameter, half a step of small layers.
    """

    base: Tensor
    cuts: dict[int, tuple[Bucket, list[Tensor], list[Tensor]]] = tree.new(dict)  # by id of the bucket
    views: list[Tensor] = tree.new(list)  # all of those in `cuts`

    def is_alone(self) -> bool:
        """Return whether nobody else holds the memory, nor one of the views."""
        uses, counts = storage_counts(self.base), list(map(sys.getrefcount, self.views))
        alone = (_ALONE_STORAGE[0] + len(self.views), _ALONE_STORAGE[1])
        return uses == alone and counts.count(_IN_TWO_LISTS) == len(counts)

    def cut(self, bucket: Bucket) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters of a bucket and its gaps as views, which whoever holds keeps from being taken again."""
        if id(bucket) not in self.cuts:
            views, gaps = bucket.cut(self.base)
            self.cuts[id(bucket)] = bucket, views, gaps
            self.views += [*views, *gaps]
        _, views, gaps = self.cuts[id(bucket)]
        return list(views), list(gaps)


_ALONE_STORAGE = storage_counts(torch.empty(1, device="cpu"))


def _counted_in_two_lists() -> int:
    first = [torch.empty(1)]
    second = list(first)
    return next(map(sys.getrefcount, second))


_IN_TWO_LISTS = _counted_in_two_lists()


HOLE = 2**20  # bytes: what smaller blocks leave behind is filled again


def give_back(tensors: list[Tensor]) -> None:
    """Give the memory of tensors back to the system, with their values, but for those that others hold, or small ones.

    The tensors can be freed later, and their memory be taken again, as ever. Else what is freed stays where malloc has
    small blocks beside it, as a hole that nothing larger fits into: 102M parameters at stage 3 with masters and
    gradients on disk held 361 MB, and 226 with this. To take it again costs page faults, 2 to 4 us each on a virtual
    machine: 60 to 100 ms for 100 MB. Only memory that torch allocated on the CPU is given back.
    """
    from fds.media.mapping import PAGE, drop, pages  # a plain step loads no media

    counts = list(map(sys.getrefcount, tensors))
    for x, count in zip(tensors, counts, strict=True):
        if x.device.type != "cpu" or x.layout is not torch.strided or not x.untyped_storage().resizable():
            continue
        start, end = pages(x.data_ptr()), (x.data_ptr() + x.nbytes) // PAGE * PAGE
        alone = count == _ALONE[2] and storage_counts(x) == _ALONE_STORAGE and x.is_contiguous()
        if alone and x.data_ptr() and end - start >= HOLE:  # torch's zeros without memory are at address 0
            drop(start, end - start)


@attrs.frozen(eq=False)
class Set:
    """The buffers of one state."""

    kind: Hashable  # of the state
    tensors: list[Tensor]
    buffers: Buffers


@attrs.define(eq=False)
class Pool:
    """Sets of buffers; a buffer is handed out again only when nobody else shares its storage.

    A cache: dropping it changes nothing. Fresh memory is what makes a pure step slow: an Adam update of 50M float32
    parameters takes 57 ms in place, 58 to 80 into memory already touched, 890 to 980 into fresh pages (two cores).
    """

    sets: list[Set] = tree.new(list)
    # The last gradients (CPU only), until the next call begins: freed at the end of a step they would let malloc give
    # the top of its heap back, 560 page faults a step of the example; a hand-written loop keeps them in `.grad` too.
    ballast: list[Tensor] = tree.new(list)
    # Flat buckets, CPU only and for the same reason: what one step gathers and reduces in, the next one does too.
    scratch: dict[tuple[int, torch.dtype], list[Scratch]] = tree.new(dict)
    taken: set[int] = tree.new(set)  # ids of those that were taken since the last sweep
    lock: threading.Lock = attrs.field(factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        keep_heap()
        _POOLS.add(self)

    def copies(
        self,
        tensors: list[Tensor],
        kind: Hashable = None,
        *,
        make: Make | None = None,
        copied: Callable[[int], bool] | None = None,
    ) -> tuple[list[Tensor], Buffers]:
        """Return contiguous copies of `tensors`, and the buffers that they are in; sets that are free are let go.

        Args:
            tensors: what to copy.
            kind: equal for tensors of equal shapes, dtypes and devices in this order.
            make: makes memory for the tensor of an index, instead of fresh memory on its device.
            copied: says of an index whether the values are to be copied; else the memory holds anything.
        """
        with self.lock:  # two threads that step at once get two sets
            chosen = self._take(tensors, kind, make or _like)
            outs = list(map(Tensor.detach, chosen.tensors))
        if copied is not None:
            indices = [i for i in range(len(outs)) if copied(i)]
            new, old = [outs[i] for i in indices], [tensors[i] for i in indices]
        else:
            new, old = outs, tensors
        if new:
            foreach.copy_(new, old)
        return outs, chosen.buffers

    def _take(self, tensors: list[Tensor], kind: Hashable, make: Make) -> Set:
        """Return a set of which every buffer is free, new ones in the place of those that are not."""
        best: tuple[Set, list[bool]] | None = None
        sets_in_use: list[Set] = []
        for set_ in self.sets:
            shared = set_.buffers.shared()
            if set_.kind == kind and (best is None or sum(shared) < sum(best[1])):
                best = set_, shared
            if shared and all(shared):
                sets_in_use.append(set_)
        if best is None or (tensors and all(best[1])):
            made = [make(i, x) for i, x in enumerate(tensors)]
            chosen = Set(kind, made, Buffers.of(made))
        else:
            chosen, shared = best
            if any(shared):
                pairs = enumerate(zip(tensors, chosen.tensors, shared, strict=True))
                made = [make(i, x) if is_shared else ours for i, (x, ours, is_shared) in pairs]
                chosen = Set(kind, made, Buffers.of(made))
        self.sets = [*sets_in_use, chosen]
        return chosen

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory (numel,) with anything in it, for as long as somebody holds it."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        with self.lock:
            return self._free(numel, dtype).base.detach()

    def take_bucket(
        self, bucket: Bucket, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return memory for a whole bucket, as `take` does, and its views: the parameters, and the gaps.

        The views are the same in every step: they are given to nobody outside of it.
        """
        if device.type != "cpu":
            flat = torch.empty(bucket.numel, dtype=dtype, device=device)
            return flat, *bucket.cut(flat)
        with self.lock:
            scratch = self._free(bucket.numel, dtype)
            return scratch.base.detach(), *scratch.cut(bucket)

    def _free(self, numel: int, dtype: torch.dtype) -> Scratch:
        """Return memory on the CPU that nobody holds."""
        scratches = self.scratch.setdefault((numel, dtype), [])
        free = next((scratch for scratch in scratches if scratch.is_alone()), None)
        if free is None:
            with torch.inference_mode(False):
                free = Scratch(torch.empty(numel, dtype=dtype, device="cpu"))
            scratches.append(free)
        self.taken.add(id(free))
        return free

    def weigh_down(self, leaves: list[Tensor], device: torch.device) -> None:
        """Keep gradients on a CPU until the next sweep: else their memory goes to the system and comes back."""
        if device.type == "cpu" and reading.now.recording is None:
            self.ballast.extend(leaves)

    def sweep(self) -> None:
        """Let go of the ballast, and of the flat buckets that nobody took since the last sweep."""
        self.ballast.clear()
        with self.lock:
            self.scratch = {
                key: [scratch for scratch in scratches if id(scratch) in self.taken or not scratch.is_alone()]
                for key, scratches in self.scratch.items()
            }
            self.taken.clear()

    def __reduce__(self) -> tuple[type[Pool], tuple[()]]:
        return (Pool, ())


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()


def _renew() -> None:
    """Let the child of a fork have the locks: the threads that held them are not in it."""
    for pool in _POOLS:
        pool.lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)


def _like(i: int, x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
