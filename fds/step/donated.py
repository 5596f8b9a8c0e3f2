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
    known, places = state.token.memory, list(map(Tensor.data_ptr, tensors))
    dense = list(map(Tensor.is_contiguous, tensors))
    if known is not None and known.kind is kind and known.places == places and all(dense):
        copied = _held(state, parts, tensors, lists + (not known.pooled))  # a 1-D view holds what it is a view of
    else:
        copied = _held(state, parts, tensors, lists)
        copied = [one or not is_dense for one, is_dense in zip(copied, dense, strict=True)]
        tensors = [x if is_dense else copy(i, x) for i, (x, is_dense) in enumerate(zip(tensors, dense, strict=True))]
        known = KnownMemory.of(tensors, kind)
    shared = known.buffers.shared(others=known.pooled)
    if any(copied) or any(shared):
        copied = [a or b for a, b in zip(copied, shared, strict=True)]
        tensors = [copy(i, x) if one else x for i, (x, one) in enumerate(zip(tensors, copied, strict=True))]
        known = KnownMemory.of(tensors, kind)
    return tensors, known


def _held(state: State, parts: Sequence[tuple[Any, list[Tensor]]], tensors: list[Tensor], lists: int) -> list[bool]:
    """Say of every tensor whether Python holds it, or a container that it is in, in more places than are known."""
    held: list[bool] = []
    listed = sum(one is state.slots for one, _ in parts)
    in_slots = next(map(sys.getrefcount, [state.slots])) != _ONCE + 1 + listed
    for one, leaves in parts:
        nodes = tree.nodes(one)
        counts = list(map(sys.getrefcount, nodes))
        known = [_ONCE + 3, *[_ONCE + 1] * len(counts[1:])]  # what each is in; and `one` and `parts` hold the first
        unknown = any(node is None for node in nodes)  # by whom its containers are held
        outside = in_slots and one is not state.params and one is not state.opt
        held += [unknown or outside or counts != known[: len(counts)]] * len(leaves)
        del nodes
    counts, known = list(map(sys.getrefcount, tensors)), _ONCE + lists + 1
    if counts.count(known) == len(counts):
        return held
    spent = Counter(id(x) for old in _given_up(state) for x in tree.leaves((old.params, old.opt, old.slots)))
    return [one or count != known + spent[id(x)] for one, count, x in zip(held, counts, tensors, strict=True)]


def _given_up(state: State) -> list[State]:
    """Return the states before this one that somebody still holds, though nobody may use them."""
    return [old for reference in state.token.before if (old := reference()) is not None]


def _references(x: list[Tensor]) -> int:
    return next(map(sys.getrefcount, x))


_ONCE = _references([torch.empty(1, device="cpu")])  # of what one list holds
