"""Leaf parts: a state as leaves of the plain state by key path, and what this rank holds of each.

Files hold the leaves of the plain state, without ranks and buckets. A slice of a bucket consists of parts of leaves,
and of padding, which is not saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.layout import Layout, Sharded
from fds.state import State
from fds.step import Step
from fds.step.residency import first_opt, made
from fds.storage.format.manifest import Chunk, SavedLeaf
from fds.storage.format.tensors import dtype_name

ON_HOST = ("calls", "key")  # leaves that are on the CPU on every device


@tree.leaf
@attrs.frozen
class LeafPart:
    """The part of a leaf that a rank holds.

    Attributes:
        tensor: the leaf; if ranks share it, a view (length,) of this rank's slice, which may be empty.
        shape: of the whole leaf.
        start: index of the first element in the flattened leaf.
        split: whether ranks share the leaf; else each has all of it.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    start: int = 0
    split: bool = False

    @property
    def end(self) -> int:
        """The index after the last element."""
        return self.start + self.tensor.numel()

    @property
    def written(self) -> Tensor:
        """The tensor to write: in the leaf's shape if whole, else flat."""
        return self.tensor.view(self.shape) if self.split and self.whole else self.tensor

    @property
    def whole(self) -> bool:
        """Whether this is all of the leaf."""
        return self.tensor.numel() == torch.Size(self.shape).numel()

    def leaf(self, chunks: tuple[Chunk, ...] = ()) -> SavedLeaf:
        """Return the manifest's record of the whole leaf."""
        return SavedLeaf(dtype_name(self.tensor.dtype), self.shape, chunks)


def parts_of(state: State, index: int) -> dict[str, LeafPart]:
    """Return the parts of the plain state's leaves by key path, given the state of the rank with slice `index`.

    In a pipeline these are the leaves of this rank's stages.
    """
    if isinstance(state.params, Sharded):
        layout = state.params.layout
        opt = {slot: _parts_of_buckets(slices, layout, index) for slot, slices in state.opt.items()}
        state = attrs.evolve(state, params=_plain(state.params, index), opt=opt, slots=_plain(state.slots, index))
    whole = lambda x: LeafPart(x, tuple(getattr(x, "shape", ())))  # leaves that are not tensors raise an error later
    return {name: x if isinstance(x, LeafPart) else whole(x) for name, x in tree.paths(state).items()}


def blank(step: Step, template: State, device: torch.device) -> State:
    """Return a state like `template` with uninitialised parts, but with padding as `step.init` initialises it."""
    sharded = isinstance(template.params, Sharded)
    shown = attrs.evolve(template, opt={}) if sharded else template
    make = torch.zeros if sharded else torch.empty  # empty: pages are first touched by reading
    residency = step.place.residency

    def leaf(name: str, x: Tensor) -> Tensor:
        kind = step.kind_of(name) if residency.kinds and device.type != "meta" else None
        if kind is not None and kind in residency.kinds:
            found = made(residency, x, kind, device)
            return found.zero_() if sharded else found
        return make(x.shape, dtype=x.dtype, device="cpu" if name in ON_HOST else device)

    state = tree.flatten(shown)[1]([leaf(name, x) for name, x in tree.paths(shown).items()])
    if not sharded:
        return state
    structure, held = step.structure_of(state.params)
    assert step.optimizer is not None
    flat = [x.view(-1) for x in structure.pick(held)]
    full = [i for i, inside in enumerate(structure.segments) if sum(s.length for s in inside) == flat[i].numel()]
    opt = first_opt(residency, step.optimizer, structure, flat, blank=full)
    return attrs.evolve(state, opt=structure.name_slots(opt))


def _parts_of_buckets(slices: Mapping[str, Tensor], layout: Layout, index: int) -> dict[str, LeafPart]:
    """Return the parts in these slices by parameter name; buckets without a slice are left out."""
    return {
        segment.name: LeafPart(segment.of(slices[bucket.name]), segment.shape, segment.start, split=True)
        for bucket in layout.buckets if bucket.name in slices for segment in bucket.segments(index)
    }  # fmt: skip


def _plain(value: Any, index: int) -> Any:
    """Return a tree in which every `Sharded` is replaced by the user's tree of parts."""
    match value:
        case Sharded(layout=layout):
            found = _parts_of_buckets(value.buckets, layout, index)
            return layout.build([found[name] for name in layout.names])
        case dict():
            return {key: _plain(x, index) for key, x in value.items()}
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*(_plain(x, index) for x in value))
        case list() | tuple():
            return type(value)(_plain(x, index) for x in value)
        case _ if attrs.has(type(value)):
            fields = [f for f in attrs.fields(type(value)) if f.init]
            return attrs.evolve(value, **{f.alias: _plain(getattr(value, f.name), index) for f in fields})
    return value
