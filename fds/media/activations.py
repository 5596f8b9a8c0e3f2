"""Activations that wait on a medium between forward and backward: written behind one, read ahead of the other.

While a group of layers runs forward, what the group before it keeps is still being written, and in memory; while one
runs backward, what the group before it kept is read. So no more than two groups' worth is in memory at once.

What a group is given may be cut into slices over ranks that have it alike; a slice is kept, here or on the medium, and
the whole is gathered while the group after it runs backward. What stays here may lie in blocks that are used again.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fds.collectives import Axis
from fds.collectives.links import dry
from fds.errors import LossError
from fds.media.medium import Medium


def slice_of(x: Tensor, axis: Axis, unit: int) -> Tensor:
    """Return this rank's slice of bytes (n,), in memory of its own: ceil(n / unit / N) elements of `unit` bytes.

    What lies behind the end of `x` is zeros.
    """
    n = -(-(len(x) // unit) // axis.size) * unit
    mine = x[axis.index * n : (axis.index + 1) * n]
    out = x.new_zeros(n) if len(mine) < n else x.new_empty(n)
    out[: len(mine)].copy_(mine)
    return out


def start_gather(part: Tensor, axis: Axis) -> Callable[[], Tensor]:
    """Begin to gather the slices (n,) of all ranks. Return the function that waits, and returns them (N * n,)."""
    whole = part.new_empty(axis.size * len(part))
    work = axis.start_all_gather(whole, part)

    def wait() -> Tensor:
        work.wait()
        return whole

    return wait


def check_alike(x: Tensor, part: Tensor, axis: Axis, where: str) -> None:
    """Raise `LossError`, on every rank, where `x`, bytes (n,) of which `part` is the slice, differs between ranks."""
    if dry.get() is not None:
        return
    sizes = torch.tensor([len(x), -len(x)], device=x.device)
    axis.start_all_reduce(sizes, "max").wait()
    most, least = sizes[0].item(), -sizes[1].item()
    differs = torch.tensor([int(most != least)], device=x.device)
    if not differs:
        differs[0] = not torch.equal(start_gather(part, axis)()[: len(x)], x)
        axis.start_all_reduce(differs, "max").wait()
    if differs:
        raise LossError(
            "activations that are to be kept in slices differ between the ranks that are to share them",
            where=f"{where}, axis {axis.name!r} of {axis.size} ranks",
            got="other values" if most == least else f"{least:,} to {most:,} bytes",
            want="ranks that pass the same batch and compute the same, as along a tensor axis",
            hint="a batch by the coordinates of the other axes; no `partition` where activations are cut already",
        )


Place = tuple[int, int, torch.device]  # which group keeps it, which of what that keeps it is, and where


@attrs.frozen(eq=False)
class Blocks:
    """Memory that is not given back between microbatches and steps, so that nothing of short life lies beside it.

    A place has as many blocks as microbatches were in flight at once, each as large as the largest tensor that it held.

    Attributes:
        number: of groups that have blocks, from the first on; None for all.
        free: place -> its blocks that nothing is in, (num_bytes,) uint8.
    """

    number: int | None = None
    free: dict[Place, list[Tensor]] = attrs.field(factory=dict, repr=False)

    def has(self, group: int) -> bool:
        """Return whether a group has blocks."""
        return self.number is None or group < self.number

    def copy(self, x: Tensor, place: Place, holder: object) -> Tensor:
        """Return a copy of bytes (n,) in a block, which is taken for as long as `holder` lives."""
        free = self.free.setdefault(place, [])
        try:
            block = free.pop()
        except IndexError:  # all are in use by other microbatches, or there is none yet
            block = None
        if block is None or len(block) < len(x):
            block = torch.empty_like(x)
        weakref.finalize(holder, free.append, block).atexit = False
        return block[: len(x)].copy_(x)


class _Behind(threading.local):
    """What this thread, a rank, keeps and has not finished to write: of its last group."""

    def __init__(self) -> None:
        self.kept: list[weakref.ref[Kept]] = []


_behind = _Behind()


@attrs.define(eq=False)
class Kept:
    """A tensor that backward needs.

    Attributes:
        groups: of its microbatch.
        group: which of them keeps it.
        source: the tensor itself, until it is written; always, where it is not moved.
        version: torch's count of in-place writes to it, when it was kept.
        num_bytes: that its elements take.
        axis: over which it is cut into slices; None where this rank keeps the whole.
        copy: in memory what is kept of it, uint8: a slice until that is written, a block.
        leaf: on the medium what is kept of it, uint8; None where that is in memory.
        written: waits for the write.
        reading: waits for what is being read, if anything is.
        gathers: whether `reading` gathers slices.
    """

    groups: KeptGroups
    group: int
    source: Tensor | None
    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    num_bytes: int = 0
    axis: Axis | None = None
    copy: Tensor | None = None
    leaf: Tensor | None = None
    written: Callable[[], Any] | None = None
    reading: Callable[[], Tensor] | None = None
    gathers: bool = False

    def settle(self) -> None:
        """Wait until it is written, and let go of the tensor. Raises `DiskError`, and `LossError` as `get` does."""
        if self.written is not None:
            written, self.written = self.written, None
            written()
            self._check_version()
            self.source = self.copy = None

    def begin(self) -> None:
        """Begin to read it, where it is not in memory."""
        if self.source is None and self.reading is None:
            if (copy := self.copy) is not None:  # a slice is only read; who gets a block may write over what he gets
                self.reading = copy.clone if self.axis is None else lambda: copy
            else:
                assert self.leaf is not None and self.groups.medium is not None
                wait = self.groups.medium.read([self.leaf], self.device)
                self.reading = lambda: wait()[0]

    def gather(self) -> None:
        """Begin to gather it, where it is in slices; its own is read by then. Raises `DiskError`."""
        if self.axis is not None and self.reading is not None and not self.gathers:
            self.reading, self.gathers = start_gather(self.reading(), self.axis), True

    def get(self) -> Tensor:
        """Return the tensor, and begin to read what backward needs next.

        Raises `DiskError`, and `LossError` where it was written over after it was kept.
        """
        if self.source is None and (self.reading is None or (self.axis is not None and not self.gathers)):
            self.groups.begin(self.group)
        x = self.source
        if x is None:
            assert self.reading is not None
            reading, self.reading, self.gathers = self.reading, None, False
            x = self._reshape(reading())
        else:
            self._check_version()
        self.groups.begin(self.group - 1)
        return x

    def get_val(self, allow_cache_entry_mutation: bool) -> Tensor:
        """Return the tensor, to torch's selective checkpoints."""
        return self.get()

    def _reshape(self, read: Tensor) -> Tensor:
        """Return elements that were read with the shape and strides that the tensor had, on which bits may depend."""
        flat = read[: self.num_bytes].view(self.dtype)
        if flat.numel() == _span(self.shape, self.stride):
            return flat.as_strided(self.shape, self.stride)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).copy_(
            flat.view(self.shape)
        )

    def _check_version(self) -> None:
        if self.source is not None and self.source._version != self.version:
            raise LossError(
                "what a checkpointed layer was computed from is written over before backward computes it again",
                got=f"an in-place operation on {tuple(self.shape)} {self.dtype}",
                want="layers that leave their input, and what they return, as it is",
                hint="inplace=False, or a clone",
            )


@attrs.define(eq=False)
class Tally:
    """Bytes that are kept, on a medium or in memory of their own.

    Attributes:
        num_bytes: now.
        most: so far.
    """

    num_bytes: int = 0
    most: int = 0

    def add(self, num_bytes: int) -> None:
        """Count so many bytes more, or fewer."""
        self.num_bytes += num_bytes
        self.most = max(self.most, self.num_bytes)


@attrs.frozen(eq=False)
class KeptGroups:
    """The groups of layers of one microbatch, in the order of forward, and what they keep.

    Attributes:
        medium: where that waits; None to leave it on the device.
        tally: counts what is kept apart from the tensors themselves, where somebody wants to know.
        axis: over whose ranks what groups are given is cut into slices; for these collectives alone.
        blocks: memory for what groups are given and stays on the device.
    """

    medium: Medium | None = None
    tally: Tally | None = None
    axis: Axis | None = None
    blocks: Blocks | None = None
    kept: list[list[weakref.ref[Kept]]] = attrs.field(factory=list)
    compared: list[str] = attrs.field(factory=list)  # by group what it is called, "" where ranks are not compared

    def open(self, compared: str = "") -> None:
        """Begin the next group: what the one before the last keeps is now only on the medium. Raises `DiskError`.

        Where it is called something, ranks compare on a CPU what it is given, before they cut it into slices.
        """
        behind, _behind.kept = _behind.kept, []
        for kept in _alive(behind):
            kept.settle()
        self.kept.append([])
        self.compared.append(compared)

    def keep(self, x: Tensor) -> Kept:
        """Keep what the group that was opened last is given, and begin to write it.

        Raises `DiskError`, and `LossError` on every rank where ranks compare it, and it differs.
        """
        version, x = x._version, x.detach()
        cut = self.axis is not None and x.is_floating_point() and x.numel() >= self.axis.size and _is_plain(x)
        return self._keep(x, version, self.axis if cut else None, self._place(x))

    def keep_result(self, x: Tensor, version: int) -> Kept:
        """Keep what the group has computed, as it was at this version, and begin to write it. Raises `DiskError`."""
        return self._keep(x.detach(), version, None, None)

    def begin(self, group: int) -> None:
        """Begin to read what a group keeps, and where it is in slices to gather it: alike on all ranks."""
        tensors = self._alive(group)
        for kept in tensors:
            kept.begin()
        for kept in tensors:
            kept.gather()
        if self.axis is not None:  # the slices that are gathered next
            for kept in self._alive(group - 1):
                kept.begin()

    def _keep(self, x: Tensor, version: int, axis: Axis | None, place: Place | None) -> Kept:
        kept = Kept(self, len(self.kept) - 1, x, version, x.shape, x.stride(), x.dtype, x.device)
        if axis is None and place is None and not self._moves(x):
            return kept
        whole = part = _bytes(x)
        kept.num_bytes = len(whole)
        if axis is not None:
            part, kept.axis = slice_of(whole, axis, x.element_size()), axis
            if self.compared[-1] and not x.is_cuda:
                check_alike(whole, part, axis, self.compared[-1])
        if self.medium is not None:
            kept.leaf = self.medium.make(part)
            kept.written = self.medium.write([part], [kept.leaf])
        elif self.blocks is not None and place is not None:
            part = self.blocks.copy(part, place, kept)
        if axis is not None or self.medium is None:
            kept.source, kept.copy = None, part
        if self.tally is not None:
            self.tally.add(part.nbytes)
            weakref.finalize(kept, self.tally.add, -part.nbytes).atexit = False
        self.kept[-1].append(weakref.ref(kept))
        if self.medium is not None:
            _behind.kept.append(self.kept[-1][-1])
        return kept

    def _place(self, x: Tensor) -> Place | None:
        """Return the place of a block for a tensor; None where it has none."""
        group = len(self.kept) - 1
        if self.blocks is None or self.medium is not None or not self.blocks.has(group):
            return None
        return (group, len(self.kept[-1]), x.device) if x.is_floating_point() and x.numel() and _is_plain(x) else None

    def _moves(self, x: Tensor) -> bool:
        """Return whether a tensor is memory that the medium can hold, and that is not the medium's own."""
        there = self.medium is None or (self.medium.name == "host" and x.device.type == "cpu")
        return _is_plain(x) and x.numel() > 0 and not there

    def _alive(self, group: int) -> list[Kept]:
        return _alive(self.kept[group]) if group >= 0 else []


def _is_plain(x: Tensor) -> bool:
    """Return whether a tensor is nothing but elements in memory."""
    plain = x.layout is torch.strided and not (x.is_conj() or x.is_neg() or is_traceable_wrapper_subclass(x))
    return plain and not getattr(x, "gathered_on_use", False)


def _bytes(x: Tensor) -> Tensor:
    """Return the memory that a tensor is in as bytes, or where that is more than its elements those."""
    span = _span(x.shape, x.stride())
    flat = x.as_strided((span,), (1,)) if span <= x.numel() else x.contiguous().view(-1)
    return flat.view(torch.uint8)


def _span(shape: Iterable[int], stride: Iterable[int]) -> int:
    """Return from how many elements of memory on a tensor with elements reads."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def _alive(kept: list[weakref.ref[Kept]]) -> list[Kept]:
    return [tensor for ref in kept if (tensor := ref()) is not None]
