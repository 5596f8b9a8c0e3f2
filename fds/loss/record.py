"""A record of tensor operations, of which any part can be done again alone: a few tensors at a time of a whole model.

A tensor of the record is a window onto a numbered storage, so that views need no entry. An operation is there because
it makes storages or writes to them; to know a tensor is to do again, in order, the operations that its storage and
what they read go back to. A draw is seeded by the key and its number, whichever others are done again.
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
    """A tensor as a view of storage number `storage`."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the view of a real storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[arg-type]


@attrs.frozen(eq=False)
class Operation:
    """A call `run(*args, **kwargs)`, where windows stand for tensors; any tensor among them is a constant."""

    run: Callable
    args: tuple
    kwargs: dict[str, Any]
    reads: frozenset[int]  # the storages whose values count
    writes: frozenset[int]  # the storages that it makes or changes
    made: dict[int, Window]  # of those that it makes: place among the results -> window
    draw: int | None = None  # the how manyth draw this is; None draws nothing


@attrs.frozen(eq=False)
class Record:
    """Operations in order, and the storages that they are about."""

    operations: list[Operation] = attrs.field(factory=list)
    writers: list[list[int]] = attrs.field(factory=list)  # storage -> the operations that write it, in order
    sizes: list[int] = attrs.field(factory=list)  # storage -> bytes
    devices: list[torch.device] = attrs.field(factory=list)  # storage -> where it is
    drawn_on: set[torch.device] = attrs.field(factory=set)

    def add_storage(self, num_bytes: int, device: torch.device) -> int:
        """Return the number of a new storage, whose first value is nothing in particular: zeros."""
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
        """Return the last value of each window, made anew; what else was needed is gone as soon as it was used.

        Torch's generators are left as they were. Raises what the operations raise.
        """
        windows = list(windows)
        kept = {w.storage for w in windows}
        chosen, blank = self._needed(kept)
        last = {s: i for i in chosen for s in self.operations[i].reads | self.operations[i].writes}
        made: dict[int, torch.UntypedStorage] = {}

        def real(x: Any) -> Any:
            if not isinstance(x, Window):
                return x
            if x.storage not in made:
                make = torch.zeros if x.storage in blank else torch.empty
                size, device = self.sizes[x.storage], self.devices[x.storage]
                made[x.storage] = make(size, dtype=torch.uint8, device=device).untyped_storage()
            return x.over(made[x.storage])

        with random.scope(self.drawn_on), torch.no_grad():
            for i in chosen:
                op = self.operations[i]
                if op.draw is not None:
                    random.reseed(random.seed(key, "draw", op.draw), self.drawn_on)
                args, kwargs = tree.map(real, (op.args, op.kwargs))
                results = tree.leaves(op.run(*args, **kwargs))
                made.update((w.storage, _as_recorded(results[place], w)) for place, w in op.made.items())
                del args, kwargs, results
                for storage in op.reads | op.writes:
                    if last[storage] == i and storage not in kept:
                        made.pop(storage, None)
            return [real(w) for w in windows]

    def _needed(self, storages: Iterable[int]) -> tuple[list[int], set[int]]:
        """Return the operations behind the last values of storages, in order, and the storages read before written."""
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
    """Return a storage in which `x` lies as recorded: a kernel may choose other strides than its shape function."""
    if (x.stride(), x.storage_offset()) != (window.stride, window.offset):
        copy = torch.empty_strided(window.shape, window.stride, dtype=x.dtype, device=x.device)
        if window.offset:
            whole = torch.empty(copy.untyped_storage().nbytes() // x.itemsize + window.offset, dtype=x.dtype,
                                device=x.device)  # fmt: skip
            copy = whole.as_strided(window.shape, window.stride, window.offset)
        x = copy.copy_(x)
    return x.untyped_storage()
