"""Memory that captured work reads and writes in every replay: of the state, the batch and the scalars of a call."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.state import State, Token
from fds.step import foreach
from fds.step.donated import TAKEN, KnownMemory, writable
from fds.step.recorded.recorder import Kind
from fds.step.structure import Structure, contiguous_copy


def leaves_of(state: State, structure: Structure) -> list[Tensor]:
    """Return all leaves of a state on the device but `step`, which is read from a place of its own."""
    return [x for column in _columns(state, structure) for x in column]


def _columns(state: State, structure: Structure) -> list[list[Tensor]]:
    """Return the leaves of parameters, optimizer state, buffers and slots."""
    opt = [state.opt[slot][name] for slot, want in structure.opt.items() for name in want.names]
    return [tree.leaves(state.params), opt, tree.leaves(state.buffers), tree.leaves(state.slots)]


def builder(state: State, structure: Structure) -> Callable[[list[Tensor]], dict[str, Any]]:
    """Return the function that builds the parts of a state from other leaves, with containers of their own."""
    flat = map(tree.flatten, (state.params, state.buffers, state.slots))
    (num_params, params), (num_buffers, buffers), (num_slots, slots) = ((len(leaves), part) for leaves, part in flat)

    def build(leaves: list[Tensor]) -> dict[str, Any]:
        rest = iter(leaves)
        return {  # in the order of `leaves_of`
            "params": params(islice(rest, num_params)),
            "opt": {slot: dict(zip(want.names, rest, strict=False)) for slot, want in structure.opt.items()},
            "buffers": buffers(islice(rest, num_buffers)),
            "slots": slots(islice(rest, num_slots)),
        }

    return build


@attrs.define(eq=False)
class StateMemory:
    """The leaves of one state after another, always in the same memory; and who has it now."""

    structure: Structure
    rest: Any  # the structure of buffers and slots
    build: Callable[[list[Tensor]], dict[str, Any]]  # leaves -> the parts of a state
    leaves: list[Tensor]
    step: Tensor  # () int64
    memory: KnownMemory
    owner: weakref.ref[State] | None = None  # the state that a call returned last
    token: Token | None = None  # of that state
    version: int = 0  # of its `step`: whether somebody wrote there

    @classmethod
    def of(cls, state: State, structure: Structure) -> StateMemory:
        """Take over the memory of a state, each of whose leaves is in one more list; others' are copied."""
        leaves, memory = _writable(state, structure, lists=2)
        rest = tree.structure((state.buffers, state.slots))
        return cls(structure, rest, builder(state, structure), leaves, state.step.clone(), memory)

    def takes(self, state: State, structure: Structure) -> bool:
        """Say whether a state is in this memory and nobody else holds it, or can be: then copy it there.

        Each of the state's leaves is in one more list.
        """
        if structure is not self.structure:
            return False
        leaves = leaves_of(state, structure)
        if all(map(operator.is_, leaves, self.leaves)):
            state.token.memory = self.memory
            writable_leaves, _ = _writable(state, structure, lists=4)
            if not all(map(operator.is_, writable_leaves, self.leaves)):
                return False
            if self.owner is None or self.owner() is not state or state.step._version != self.version:
                self.step.copy_(state.step)
            return True
        if not self.is_free() or tree.structure((state.buffers, state.slots)) != self.rest:
            return False
        foreach.copy_([*self.leaves, self.step], [*leaves, state.step])
        return True

    def is_wanted(self, state: State) -> bool:
        """Say whether another state is in this memory, which may be given to a call again."""
        owner = None if self.owner is None else self.owner()
        return owner is not None and owner is not state and owner.token.spent_at is None

    def is_free(self) -> bool:
        """Say whether nobody reads this memory any more: no state, no save, nothing else."""
        if self.token is None or self.token.readers or any(self.memory.buffers.shared()):
            return False
        return list(map(sys.getrefcount, self.leaves)).count(_ALONE) == len(self.leaves)

    def state(self, like: State) -> State:
        """Return the state in this memory, to be worked on: its tensors may be written over."""
        return State(self.step, like.calls, key=like.key, token=Token(memory=TAKEN), **self.build(self.leaves))

    def write(self, after: State) -> None:
        """Write what has become of the state where that is not done already."""
        new, places = [*leaves_of(after, self.structure), after.step], [*self.leaves, self.step]
        storages = set(map(storage_of, places))
        moved = [(x, y) for x, y in zip(places, new, strict=True) if x.numel() and not same_memory(x, y)]
        if moved:  # and one leaf may have become what another was
            new = [y.clone() if storage_of(y) in storages else y for _, y in moved]
            foreach.copy_([x for x, _ in moved], new)

    def returned(self, old: State, step: Tensor) -> State:
        """Return the state after a call, given a copy of its `step`; it has the memory from here on."""
        token = Token.after(old, self.memory)
        new = State(step, old.calls + 1, key=old.key, token=token, **self.build(self.leaves))
        self.owner, self.token, self.version = weakref.ref(new), token, step._version
        old.token.became = True
        return new


def _writable(state: State, structure: Structure, *, lists: int) -> tuple[list[Tensor], KnownMemory]:
    """Return the leaves of a state, or copies of those that anybody else holds, and what is known of their memory."""
    parts = list(zip((state.params, state.opt, state.buffers, state.slots), _columns(state, structure), strict=True))
    return writable(state, parts, structure, lists, lambda i, x: contiguous_copy(x))


@attrs.frozen(eq=False)
class BatchMemory:
    """Memory like the tensors of a batch, of the same strides, and the batch that is in it."""

    tensors: list[Tensor]
    batch: Any

    @classmethod
    def like(cls, kind: Kind) -> BatchMemory:
        """Return memory for batches of a kind."""
        tensors = [torch.empty_like(x, requires_grad=x.requires_grad) for x in kind.tensors]
        return cls(tensors, kind.build(tensors))

    def copy(self, kind: Kind) -> None:
        """Copy a batch here."""
        if self.tensors:
            foreach.copy_([x.detach() for x in self.tensors], [x.detach() for x in kind.tensors])


@attrs.define(eq=False)
class Results:
    """Scalars that a call returns, side by side in one buffer, of which every call gets a copy."""

    buffer: Tensor  # (N,) uint8
    names: dict[torch.dtype, list[str]]  # of the scalars of a dtype, which lie one after another

    @classmethod
    def like(cls, scalars: Mapping[str, Tensor]) -> Results:
        """Return memory for these scalars, () each."""
        names: dict[torch.dtype, list[str]] = {}
        for name, x in sorted(scalars.items(), key=lambda item: -item[1].itemsize):  # each lies at a multiple of it
            names.setdefault(x.dtype, []).append(name)
        device = next(iter(scalars.values())).device
        size = sum(x.itemsize for x in scalars.values())
        return cls(torch.zeros(size, dtype=torch.uint8, device=device), names)

    def write(self, scalars: Mapping[str, Tensor]) -> None:
        """Write the scalars of a call."""
        for place, names in self._cut(self.buffer):
            torch.stack([scalars[name] for name in names], out=place)

    def read(self) -> dict[str, Tensor]:
        """Return copies of them, which later calls leave alone."""
        copies = self._cut(self.buffer.clone())
        return {name: x for place, names in copies for name, x in zip(names, place.unbind(), strict=True)}

    def fits(self, scalars: Mapping[str, Tensor]) -> bool:
        """Say whether these are scalars of the same names and dtypes."""
        dtypes = {name: dtype for dtype, names in self.names.items() for name in names}
        return {name: x.dtype for name, x in scalars.items()} == dtypes

    def _cut(self, buffer: Tensor) -> Iterable[tuple[Tensor, list[str]]]:
        start = 0
        for dtype, names in self.names.items():
            end = start + dtype.itemsize * len(names)
            yield buffer[start:end].view(dtype), names
            start = end


def storage_of(x: Tensor) -> int:
    """Return what tells the memory of a tensor from that of others."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  (an address is 0 on `meta`)


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Say whether two tensors of one shape are the same elements in memory."""
    return storage_of(x) == storage_of(y) and (x.storage_offset(), x.stride()) == (y.storage_offset(), y.stride())


def _counted_alone() -> int:
    leaves = [torch.empty(1)]
    memory = KnownMemory.of(leaves, None)
    count = next(map(sys.getrefcount, leaves))
    del memory
    return count


_ALONE = _counted_alone()  # of what one list holds, whose memory is known
