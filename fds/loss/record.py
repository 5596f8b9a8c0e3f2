"""A record of tensor operations that can be replayed in part: for a few tensors of a model at a time.

A recorded tensor is a window onto a numbered storage, so views need no entry. Recorded operations are those that create
storages or write to them. The value of a tensor is computed by replaying, in order, the operations on which its storage
depends. A random operation is seeded by the key and its index, so its values do not depend on what else is replayed.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import random, tree


@attrs.frozen
class Window:
    """A recorded tensor: a view of storage number `storage`."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the view of a real storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


@attrs.frozen(eq=False)
class Operation:
    """A call `run(*args, **kwargs)`, in which windows stand for recorded tensors; other tensors are constants."""

    run: Callable
    args: tuple
    kwargs: dict[str, Any]
    reads: frozenset[int]  # storages whose values it depends on
    writes: frozenset[int]  # storages that it creates or changes
    created: dict[int, Window]  # index of a result -> window onto the storage created for it
    draw: int | None = None  # index of this draw; None if it draws no random numbers


@attrs.frozen(eq=False)
class Record:
    """Operations in order, and the storages that they use."""

    operations: list[Operation] = attrs.field(factory=list)
    writers: list[list[int]] = attrs.field(factory=list)  # storage -> indices of operations that write to it, in order
    sizes: list[int] = attrs.field(factory=list)  # storage -> bytes
    devices: list[torch.device] = attrs.field(factory=list)  # storage -> its device
    drawn_on: set[torch.device] = attrs.field(factory=set)

    def add_storage(self, num_bytes: int, device: torch.device) -> int:
        """Add a storage, which holds zeros until it is written to, and return its number."""
        self.writers.append([])
        self.sizes.append(num_bytes)
        self.devices.append(device)
        return len(self.sizes) - 1

    def add(self, operation: Operation) -> None:
        """Append an operation."""
        for storage in operation.writes:
            self.writers[storage].append(len(self.operations))
        self.operations.append(operation)

    def replay(self, windows: Iterable[Window], key: Tensor) -> list[Tensor]:
        """Return the final value of each window in new memory; intermediate storages are freed after their last use.

        Torch's generators keep their states. Raises what the operations raise.
        """
        windows = list(windows)
        kept = {w.storage for w in windows}
        chosen, blank = self._needed(kept)
        last = {s: i for i in chosen for s in self.operations[i].reads | self.operations[i].writes}
        storages: dict[int, torch.UntypedStorage] = {}

        def real(x: Any) -> Any:
            if not isinstance(x, Window):
                return x
            if x.storage not in storages:
                create = torch.zeros if x.storage in blank else torch.empty
                size, device = self.sizes[x.storage], self.devices[x.storage]
                storages[x.storage] = create(size, dtype=torch.uint8, device=device).untyped_storage()
            return x.over(storages[x.storage])

        with random.scope(self.drawn_on), torch.no_grad():
            for i in chosen:
                op = self.operations[i]
                if op.draw is not None:
                    random.reseed(random.seed(key, "draw", op.draw), self.drawn_on)
                args, kwargs = tree.map(real, (op.args, op.kwargs))
                results = tree.leaves(op.run(*args, **kwargs))
                storages.update((w.storage, _as_recorded(results[index], w)) for index, w in op.created.items())
                del args, kwargs, results
                for storage in op.reads | op.writes:
                    if last[storage] == i and storage not in kept:
                        storages.pop(storage, None)
            return [real(w) for w in windows]

    def _needed(self, storages: Iterable[int]) -> tuple[list[int], set[int]]:
        """Return the operations that final values depend on, in order, and storages that are read before written."""
        chosen: set[int] = set()
        blank: set[int] = set()
        todo = [(s, len(self.operations)) for s in storages]
        while todo:
            storage, before = todo.pop()
            place = bisect.bisect_left(self.writers[storage], before)
            if place == 0:
                blank.add(storage)
            elif (i := self.writers[storage][place - 1]) not in chosen:
                chosen.add(i)
                todo += [(read, i) for read in self.operations[i].reads]
        return sorted(chosen), blank


def _as_recorded(x: Tensor, window: Window) -> torch.UntypedStorage:
    """Return a storage of `x` in the recorded layout: a kernel may choose other strides than its shape function."""
    if (x.stride(), x.storage_offset()) != (window.stride, window.offset):
        copy = torch.empty_strided(window.shape, window.stride, dtype=x.dtype, device=x.device)
        if window.offset:
            whole = torch.empty(
                copy.untyped_storage().nbytes() // x.itemsize + window.offset, dtype=x.dtype, device=x.device
            )
            copy = whole.as_strided(window.shape, window.stride, window.offset)
        x = copy.copy_(x)
    return x.untyped_storage()
