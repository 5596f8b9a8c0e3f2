"""Which tensors a step holds, and since which phase and module: a dispatch mode that follows their storages."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fds.collectives.memory import performing
from fds.profiling.counting import Watching, tensors_of

Kind = tuple[str, str]  # a part of the state or a phase of a step, and the module that made it


class Held(NamedTuple):
    """A storage that is alive."""

    storage: weakref.ref[Any]
    num_bytes: int
    kind: Kind
    number: int  # of this storage among all that were held

    @property
    def is_there(self) -> bool:
        """Whether it still has its memory, which `resize_` gives back while no operator runs."""
        storage = self.storage()
        return storage is not None and storage.nbytes() == self.num_bytes


class Holding(Watching):
    """Follow the storages of tensors that operators are given and return, and remember what there was at the peak.

    Attributes:
        held: kind -> bytes now.
        most: bytes at the peak since `begin`.
        at_peak: kind -> bytes then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: Counter[Kind] = Counter()
        self.most, self.at_peak, self.now = 0, Counter[Kind](), 0
        self._known: dict[int, Held] = {}  # by address: some storages lie over others
        self._count, self._count_at_peak = 0, 0  # of storages that were held

    def begin(self) -> None:
        """Take what is held now for the peak."""
        self.most, self.at_peak, self._count_at_peak = self.now, Counter(self.held), self._count

    def at_peak_of(self, x: Tensor) -> Kind | None:
        """Return what a tensor that is alive counted as at the peak, None where it was not there."""
        one = self._known.get(x.untyped_storage().data_ptr())
        return None if one is None or one.number > self._count_at_peak else one.kind

    def name(self, kind: Kind, tensors: Iterable[Any]) -> None:
        """Say of tensors what they are."""
        for x in tensors:
            if isinstance(x, Tensor) and _is_plain(x):
                self._drop(x.untyped_storage().data_ptr())
                self._hold(x, kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and see what it was given and what it returns."""
        out = func(*args, **(kwargs or {}))
        if performing.get():
            return out
        kind = None
        for x in filter(_is_plain, tensors_of((args, kwargs, out))):
            if not self._holds(x.untyped_storage().data_ptr()):
                module, phase = kind = kind or self.place()
                self._hold(x, (phase, module))
        if self.now > self.most:
            for address in [*self._known]:
                self._holds(address)
            if self.now > self.most:
                self.begin()
        return out

    def _holds(self, address: int) -> bool:
        """Say whether something is held there; let go of what was, and has given its memory back."""
        one = self._known.get(address)
        if one is not None and not one.is_there:
            self._drop(address)
            return False
        return one is not None

    def _hold(self, x: Tensor, kind: Kind) -> None:
        storage = x.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        self._count += 1
        self._known[address] = Held(weakref.ref(storage, lambda _: self._drop(address)), size, kind, self._count)
        self.held[kind] += size
        self.now += size

    def _drop(self, address: int) -> None:
        if (one := self._known.pop(address, None)) is not None:
            self.held[one.kind] -= one.num_bytes
            self.now -= one.num_bytes


def _is_plain(x: Tensor) -> bool:
    """Say whether a tensor has memory of its own, unlike a parameter that is gathered on use."""
    return type(x) in (Tensor, Parameter) and x.layout is torch.strided and not x.is_meta
