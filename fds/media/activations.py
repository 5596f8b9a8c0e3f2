"""Activations that wait on a medium between forward and backward: written behind one, read ahead of the other.

While a group of layers runs forward, what the group before it keeps is still being written, and in memory; while one
runs backward, what the group before it kept is read. So no more than two groups' worth is in memory at once.
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

from fds.errors import LossError
from fds.media.medium import Medium


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
        leaf: its elements on the medium, (num_bytes,) uint8; None where it is not moved.
        written: waits for the write.
        reading: waits for what is being read, if anything is.
    """

    groups: KeptGroups
    group: int
    source: Tensor | None
    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    leaf: Tensor | None = None
    written: Callable[[], Any] | None = None
    reading: Callable[[], list[Tensor]] | None = None

    def settle(self) -> None:
        """Wait until it is written, and let go of the tensor. Raises `DiskError`, and `LossError` as `get` does."""
        if self.written is not None:
            written, self.written = self.written, None
            written()
            self._check_version()
            self.source = None

    def begin(self) -> None:
        """Begin to read it, where it is not in memory."""
        if self.source is None and self.reading is None:
            assert self.leaf is not None
            self.reading = self.groups.medium.read([self.leaf], self.device)

    def get(self) -> Tensor:
        """Return the tensor, and begin to read what backward needs next.

        Raises `DiskError`, and `LossError` where it was written over after it was kept.
        """
        self.groups.begin(self.group)
        found = self.source
        if found is None:
            assert self.reading is not None
            reading, self.reading = self.reading, None
            found = self._shaped(*reading())
        else:
            self._check_version()
        self.groups.begin(self.group - 1)
        return found

    def get_val(self, allow_cache_entry_mutation: bool) -> Tensor:
        """Return the tensor, to torch's selective checkpoints."""
        return self.get()

    def _shaped(self, read: Tensor) -> Tensor:
        """Return elements that were read with the shape and strides that the tensor had, on which bits may depend."""
        flat = read.view(self.dtype)
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
    """Bytes that are kept on a medium.

    Attributes:
        held: now.
        most: so far.
    """

    held: int = 0
    most: int = 0

    def add(self, num_bytes: int) -> None:
        """Count so many bytes more, or fewer."""
        self.held += num_bytes
        self.most = max(self.most, self.held)


@attrs.frozen(eq=False)
class KeptGroups:
    """The groups of layers of one microbatch, in the order of forward, and what they keep on a medium.

    A `tally` counts that, where somebody wants to know.
    """

    medium: Medium
    tally: Tally | None = None
    kept: list[list[weakref.ref[Kept]]] = attrs.field(factory=list)

    def open(self) -> None:
        """Begin the next group: what the one before the last keeps is now only on the medium. Raises `DiskError`."""
        behind, _behind.kept = _behind.kept, []
        for one in _alive(behind):
            one.settle()
        self.kept.append([])

    def keep(self, x: Tensor, version: int | None = None) -> Kept:
        """Keep a tensor, as it was at this version, for the group that was opened last, and begin to write it.

        Raises `DiskError`.
        """
        version, x = x._version if version is None else version, x.detach()
        found = Kept(self, len(self.kept) - 1, x, version, x.shape, x.stride(), x.dtype, x.device)
        if self._moves(x):
            span = _span(x.shape, x.stride())
            flat = x.as_strided((span,), (1,)) if span <= x.numel() else x.contiguous().view(-1)
            as_bytes = flat.view(torch.uint8)
            found.leaf = self.medium.make(as_bytes)
            if self.tally is not None:
                self.tally.add(as_bytes.nbytes)
                weakref.finalize(found, self.tally.add, -as_bytes.nbytes).atexit = False
            found.written = self.medium.write([as_bytes], [found.leaf])
            self.kept[-1].append(weakref.ref(found))
            _behind.kept.append(self.kept[-1][-1])
        return found

    def begin(self, group: int) -> None:
        """Begin to read what a group keeps."""
        for one in _alive(self.kept[group]) if group >= 0 else ():
            one.begin()

    def _moves(self, x: Tensor) -> bool:
        """Return whether a tensor is memory that the medium can hold, and that is not the medium's own."""
        plain = x.layout is torch.strided and not (x.is_conj() or x.is_neg() or is_traceable_wrapper_subclass(x))
        there = self.medium.name == "host" and x.device.type == "cpu"
        return plain and x.numel() > 0 and not there and not getattr(x, "gathered_on_use", False)


def _span(shape: Iterable[int], stride: Iterable[int]) -> int:
    """Return from how many elements of memory on a tensor with elements reads."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


def _alive(kept: list[weakref.ref[Kept]]) -> list[Kept]:
    return [one for ref in kept if (one := ref()) is not None]
