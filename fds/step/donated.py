"""The memory of a state that was given up: written over where nobody else holds it, copied where somebody does."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.state import State
from fds.step.pool import Buffers


@attrs.frozen(eq=False)
class KnownMemory:
    """What is known of the tensors of a state that may be given up: a cache, kept with the token of that state."""

    places: list[int]  # addresses; the buffers keep them from being given to others
    kind: Any  # of the state
    buffers: Buffers
    pooled: bool  # whether these are a pool's, which holds tensors of its own there

    @classmethod
    def of(cls, tensors: list[Tensor], kind: Any, buffers: Buffers | None = None) -> KnownMemory:
        """Return the record of contiguous tensors; `buffers` are those of a pool that they came from."""
        places = list(map(Tensor.data_ptr, tensors))
        return cls(places, kind, Buffers.of(tensors) if buffers is None else buffers, buffers is not None)


TAKEN = KnownMemory([], None, Buffers([], [], []), pooled=False)  # of a state whose tensors may all be written over


def writable(
    state: State,
    parts: Sequence[tuple[Any, list[Tensor]]],
    kind: Any,
    lists: int,
    copy: Callable[[int, Tensor], Tensor],
) -> tuple[list[Tensor], KnownMemory]:
    """Return tensors of a state that may be written over, and what is known of their memory.

    A tensor is copied if it is not contiguous, or if anything but this state and those that were given up before it
    holds it, a dict that it is in, or its storage: another state that was made by a map, a view, an array. So is one
    in a container whose holders cannot be counted: a dataclass, a `Mapping`, a class registered with torch's pytree.

    Args:
        state: whose tensors they are.
        parts: trees that the state holds, each with those of its leaves that are to be written.
        kind: equal where shapes and dtypes are.
        lists: of the caller's, how many hold each tensor.
        copy: copies the tensor of an index, in the order of the parts, to memory of its own.
    """
    tensors = [x for _, leaves in parts for x in leaves]
    if state.token.memory is TAKEN:
        return tensors, KnownMemory.of(tensors, kind)
    memory, places = state.token.memory, list(map(Tensor.data_ptr, tensors))
    dense = list(map(Tensor.is_contiguous, tensors))
    if memory is not None and memory.kind is kind and memory.places == places and all(dense):
        copied = _held(state, parts, tensors, lists + (not memory.pooled))  # a 1-D view holds what it is a view of
    else:
        copied = _held(state, parts, tensors, lists)
        copied = [is_copied or not is_dense for is_copied, is_dense in zip(copied, dense, strict=True)]
        tensors = [x if is_dense else copy(i, x) for i, (x, is_dense) in enumerate(zip(tensors, dense, strict=True))]
        memory = KnownMemory.of(tensors, kind)
    shared = memory.buffers.shared(others=memory.pooled)
    if any(copied) or any(shared):
        copied = [a or b for a, b in zip(copied, shared, strict=True)]
        tensors = [copy(i, x) if is_copied else x for i, (x, is_copied) in enumerate(zip(tensors, copied, strict=True))]
        memory = KnownMemory.of(tensors, kind)
    return tensors, memory


def _held(state: State, parts: Sequence[tuple[Any, list[Tensor]]], tensors: list[Tensor], lists: int) -> list[bool]:
    """Say of every tensor whether Python holds it, or a container that it is in, in more places than are known."""
    shared: list[bool] = []
    listed = sum(tree_ is state.slots for tree_, _ in parts)
    in_slots = next(map(sys.getrefcount, [state.slots])) != _ONCE + 1 + listed
    for tree_, leaves in parts:
        nodes = tree.nodes(tree_)
        counts = list(map(sys.getrefcount, nodes))
        expected = [_ONCE + 3, *[_ONCE + 1] * len(counts[1:])]  # what each is in; `tree_` and `parts` hold the first
        unknown = any(node is None for node in nodes)  # by whom its containers are held
        outside = in_slots and tree_ is not state.params and tree_ is not state.opt
        shared += [unknown or outside or counts != expected[: len(counts)]] * len(leaves)
        del nodes
    counts, holders = list(map(sys.getrefcount, tensors)), _ONCE + lists + 1
    if counts.count(holders) == len(counts):
        return shared
    spent = Counter(id(x) for old in _given_up(state) for x in tree.leaves((old.params, old.opt, old.slots)))
    return [
        is_shared or count != holders + spent[id(x)]
        for is_shared, count, x in zip(shared, counts, tensors, strict=True)
    ]


def _given_up(state: State) -> list[State]:
    """Return the states before this one that somebody still holds, though nobody may use them."""
    return [old for reference in state.token.before if (old := reference()) is not None]


def _references(x: list[Tensor]) -> int:
    return next(map(sys.getrefcount, x))


_ONCE = _references([torch.empty(1, device="cpu")])  # of what one list holds
