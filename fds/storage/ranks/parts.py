"""Parts: a state by the leaves and names that a plain step would give it, and what this rank holds of each.

Files know neither ranks nor buckets: they hold the leaves of the plain state. A slice of a bucket is parts of some of
them, and the padding between is no part of anything.
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
from fds.storage.format.manifest import Chunk, Leaf
from fds.storage.format.tensors import dtype_name

ON_HOST = ("calls", "key")  # what the host reads without asking the device


@tree.leaf
@attrs.frozen
class Part:
    """What a rank holds of one leaf.

    Attributes:
        tensor: the leaf; where ranks share it, a view (length,) of this rank's slice, of length 0 where it has none.
        shape: of the whole leaf.
        start: which of its elements comes first.
        split: whether ranks share it; else each has all of it.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    start: int = 0
    split: bool = False

    @property
    def end(self) -> int:
        """The element behind the last one."""
        return self.start + self.tensor.numel()

    @property
    def written(self) -> Tensor:
        """The tensor that a file gets: of the leaf's shape, or flat where it is a piece."""
        return self.tensor.view(self.shape) if self.split and self.whole else self.tensor

    @property
    def whole(self) -> bool:
        """Whether it is all of the leaf."""
        return self.tensor.numel() == torch.Size(self.shape).numel()

    def leaf(self, chunks: tuple[Chunk, ...] = ()) -> Leaf:
        """Return the manifest's record of the whole leaf."""
        return Leaf(dtype_name(self.tensor.dtype), self.shape, chunks)


def parts_of(state: State, index: int) -> dict[str, Part]:
    """Return the leaves of the plain state by key path, given the state of the rank with slice `index`.

    In a pipeline those of this rank's stages.
    """
    if isinstance(state.params, Sharded):
        layout = state.params.layout
        opt = {slot: _parts_of_buckets(slices, layout, index) for slot, slices in state.opt.items()}
        state = attrs.evolve(state, params=_plain(state.params, index), opt=opt, slots=_plain(state.slots, index))
    whole = lambda x: Part(x, tuple(getattr(x, "shape", ())))  # what is no tensor is refused later
    return {name: x if isinstance(x, Part) else whole(x) for name, x in tree.paths(state).items()}


def blank(step: Step, template: State, device: torch.device) -> State:
    """Return memory for a state like `template`, with anything in its parts and what `step.init` puts between them."""
    sharded = isinstance(template.params, Sharded)
    shown = attrs.evolve(template, opt={}) if sharded else template
    make = torch.zeros if sharded else torch.empty  # empty ones are not touched before they are read
    leaves = [
        make(x.shape, dtype=x.dtype, device="cpu" if name in ON_HOST else device)
        for name, x in tree.paths(shown).items()
    ]
    state = tree.flatten(shown)[1](leaves)
    if not sharded:
        return state
    structure, held = step.structure_of(state.params)
    assert step.optimizer is not None
    flat = [x.view(-1) for x in structure.pick(held)]
    return attrs.evolve(state, opt=structure.name_slots(step.optimizer.init(structure.segments, params=flat)))


def _parts_of_buckets(slices: Mapping[str, Tensor], layout: Layout, index: int) -> dict[str, Part]:
    """Return the parts in these slices, by name of their parameter; not every bucket need have one."""
    return {
        segment.name: Part(segment.of(slices[bucket.name]), segment.shape, segment.start, split=True)
        for bucket in layout.buckets if bucket.name in slices for segment in bucket.segments(index)
    }  # fmt: skip


def _plain(value: Any, index: int) -> Any:
    """Return a tree with the user's tree of parts in the place of what is sharded, wherever in it that lies."""
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
