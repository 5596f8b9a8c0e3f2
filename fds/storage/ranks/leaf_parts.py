"""Leaf parts: a state as leaves of the plain state by key path, and what this rank holds of each.

Files hold the leaves of the plain state, without ranks and buckets. A slice of a bucket consists of parts of leaves,
and of padding, which is not saved. Ranks that train apart between synchronisations have versions of a leaf each: the
first has the leaf's own name, so that whoever knows nothing of the others reads that; version r of `params.w` is
`params.w@version1`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import StorageError
from fds.layout import Box, Layout, Segment, Sharded
from fds.state import State
from fds.step import Step
from fds.step.residency.chunks import blank_opt, gaps_of, padded
from fds.step.residency.contract import check_apart, is_held, made
from fds.storage.disk.reader import touch_fresh
from fds.storage.format import boxes
from fds.storage.format.manifest import Chunk, SavedLeaf
from fds.storage.format.tensors import dtype_name
from fds.storage.ranks.exchange import Ranks

ON_HOST = ("calls", "key")  # leaves that are on the CPU on every device


@tree.leaf
@attrs.frozen
class LeafPart:
    """The part of a leaf that a rank holds."""

    tensor: Tensor  # the leaf; if ranks share it, a view (length,) of this rank's slice, which may be empty
    shape: tuple[int, ...]  # of the whole leaf
    start: int = 0  # index of the first element in the flattened leaf, or piece of it
    split: bool = False  # whether slices of buckets hold the leaf; else this rank has all of it, or of the piece
    # the piece of the leaf that this is of, by dim, where ranks hold pieces; None for all of it
    ranges: boxes.Ranges | None = None
    # the name of the parameter, or buffer, that the leaf is of, where that decides on how it lies
    parameter: str | None = None
    # of a leaf that is all terms of a sum, (terms, *shape), which one this is; None of any other leaf
    term: int | None = None
    is_copy: bool = False  # whether a rank before this one holds the same term

    @property
    def end(self) -> int:
        """The index after the last element."""
        return self.start + self.tensor.numel()

    @property
    def written(self) -> Tensor:
        """The tensor to write: in the shape of the leaf, or piece, if it is all of that, else flat."""
        shape = self.shape if self.ranges is None else boxes.shape_at(self.ranges)
        return self.tensor.view(shape) if self.split and self.tensor.numel() == math.prod(shape) else self.tensor

    @property
    def has_boxes(self) -> bool:
        """Whether the piece is of several boxes."""
        return self.ranges is not None and any(len(along) != 1 for along in self.ranges)

    def by_box(self, tensor: Tensor) -> Iterator[tuple[Box | None, int, Tensor]]:
        """Yield (box, index of the first element in the flattened box, view) of a contiguous tensor like this part's.

        A piece of several boxes yields one or a few for each that it has elements of. The box is None for all of a
        leaf.
        """
        if self.ranges is None:
            yield None, self.start, tensor
        elif self.has_boxes:
            yield from boxes.by_box(tensor.reshape(-1), self.ranges, self.start)
        else:
            yield tuple(interval for (interval,) in self.ranges), self.start, tensor

    def leaf(self, chunks: tuple[Chunk, ...] = ()) -> SavedLeaf:
        """Return the manifest's record of the whole leaf."""
        return SavedLeaf(dtype_name(self.tensor.dtype), self.shape, chunks)


def parts_of(state: State, ranks: Ranks) -> dict[str, LeafPart]:
    """Return the parts of the plain state's leaves that this rank holds, by key path.

    Raises `StorageError` for a slot that should lie as the parameters do, and does not.
    """
    index = ranks.dimensions.slice
    if isinstance(state.params, Sharded):
        layout = state.params.layout
        opt = {slot: _parts_of_buckets(slices, layout, index) for slot, slices in state.opt.items()}
        state = attrs.evolve(state, params=_plain(state.params, index), opt=opt, slots=_plain(state.slots, index))
    whole = lambda x: LeafPart(x, tuple(getattr(x, "shape", ())))  # leaves that are not tensors raise an error later
    parts = {name: x if isinstance(x, LeafPart) else whole(x) for name, x in tree.paths(state).items()}
    parts = _pieces(parts, ranks) if ranks.dimensions.pieces else parts
    for slot in ranks.partial & state.slots.keys():
        parts |= {f"slots.{slot}.{name}": _term(name, x, ranks) for name, x in state.slots[slot].items()}
    index = ranks.dimensions.replica
    return {version_name(path, index) if index and _is_own(path, ranks) else path: x for path, x in parts.items()}


def _is_own(path: str, ranks: Ranks) -> bool:
    """Say whether ranks along a local axis have versions of a leaf."""
    kind, _, rest = path.partition(".")
    slot = rest.partition(".")[0]
    if kind == "opt":
        return not ranks.agrees(slot)
    return kind == "params" or (kind == "slots" and slot in ranks.mirrors)


def _term(name: str, x: Tensor, ranks: Ranks) -> LeafPart:
    """Return this rank's term of a sum over the ranks that have gradients of a parameter."""
    index, count, first = ranks.dimensions.terms(name)
    flat, place = x.contiguous().view(-1), ranks.dimensions.cells(name, x.shape)
    if place is None:
        return LeafPart(flat, (count, *x.shape), index * x.numel(), split=True, term=index, is_copy=not first)
    whole, ranges = place
    ranges = (((index, 1),), *ranges)
    return LeafPart(flat, (count, *whole), split=True, ranges=ranges, term=index, is_copy=not first)


def _pieces(parts: dict[str, LeafPart], ranks: Ranks) -> dict[str, LeafPart]:
    """Return the parts as pieces of the whole leaves, where this rank holds pieces of parameters."""
    shapes = {path.removeprefix("params."): part.shape for path, part in parts.items() if path.startswith("params.")}
    pieces = {}
    for path, part in parts.items():
        if (name := _parameter(path, shapes, ranks.mirrors)) is None:
            pieces[path] = part
            continue
        place = ranks.dimensions.cells(name, shapes.get(name, part.shape))
        if place is not None and part.shape != shapes.get(name, part.shape):
            raise StorageError(
                "ranks hold pieces of a parameter, and nothing says how this lies over them",
                where=path,
                got=f"shape {part.shape}",
                want=f"{shapes[name]}, that of the piece of {name}",
                hint="a slot that every rank has alike says so: fds.step.Memory(slot, init, 'replicated')",
            )
        shape, ranges = (part.shape, None) if place is None else place
        pieces[path] = attrs.evolve(part, shape=shape, ranges=ranges, parameter=name)
    return pieces


def _parameter(path: str, names: Mapping[str, Any], mirrors: Collection[str]) -> str | None:
    """Return the name of the parameter, or buffer, that a leaf is of; None for any other leaf."""
    kind, *words = path.split(".")
    if kind in ("params", "buffers"):
        return ".".join(words)
    if kind == "opt":
        return ".".join(words[1:])
    if kind != "slots" or words[0] not in mirrors:
        return None
    ends = (".".join(words[i:]) for i in range(1, len(words)))
    return next((name for name in ends if name in names), None)


def blank(step: Step, template: State, device: torch.device) -> State:
    """Return a state like `template` with uninitialised parts, but with padding as `step.init` initialises it."""
    sharded = isinstance(template.params, Sharded)
    shown = attrs.evolve(template, opt={}) if sharded else template
    make = torch.zeros if sharded else torch.empty  # empty: pages are first touched by reading
    residency, made_leaves = step.place.residency, []
    structure = step.structure_of(template.params)[0] if residency.kinds and device.type != "meta" else None

    slices: dict[str, list[Segment]] = {}
    if isinstance(template.params, Sharded):
        buckets, index = template.params.layout.buckets, step.dimensions.slice
        slices = {f"params.buckets.{bucket.name}": bucket.segments(index) for bucket in buckets}

    def leaf(name: str, x: Tensor) -> Tensor:
        leaf_place = None if structure is None else step.resident(structure, name)
        if is_held(residency, leaf_place, x.numel()):
            made_leaf = made(residency, x, leaf_place, device)
            made_leaves.append(made_leaf)
            if sharded and structure is not None and leaf_place is not None:
                padded(residency, structure, made_leaf, leaf_place, step.dimensions.slice)
            return made_leaf
        if name in slices:  # zeros for all of it would touch each page once more than reading does
            blank_slice = torch.empty(x.shape, dtype=x.dtype, device=device)
            touch_fresh(blank_slice)
            for at, end in gaps_of(slices[name], x.numel()):
                blank_slice[at:end] = 0
            return blank_slice
        return make(x.shape, dtype=x.dtype, device="cpu" if name in ON_HOST else device)

    state = tree.flatten(shown)[1]([leaf(name, x) for name, x in tree.paths(shown).items()])
    if not sharded:
        check_apart(residency, made_leaves)
        return state
    structure, params = step.structure_of(state.params)
    flat = [x.view(-1) for x in structure.pick(params)]
    opt = blank_opt(residency, structure, flat, device)
    state = attrs.evolve(state, opt=structure.name_slots(opt))
    if "opt" in residency.kinds:
        leaves = {f"opt.{at}": x for at, x in tree.paths(state.opt).items()}
        made_leaves += [x for at, x in leaves.items() if is_held(residency, step.resident(structure, at), x.numel())]
    check_apart(residency, made_leaves)
    return state


def _parts_of_buckets(slices: Mapping[str, Tensor], layout: Layout, index: int) -> dict[str, LeafPart]:
    """Return the parts in these slices by parameter name; buckets without a slice are left out."""
    return {
        segment.name: LeafPart(segment.of(slices[bucket.name]), segment.shape, segment.start, split=True)
        for bucket in layout.buckets
        if bucket.name in slices
        for segment in bucket.segments(index)
    }


def _plain(value: Any, index: int) -> Any:
    """Return a tree in which every `Sharded` is replaced by the user's tree of parts."""
    match value:
        case Sharded(layout=layout):
            parts = _parts_of_buckets(value.buckets, layout, index)
            return layout.build([parts[name] for name in layout.names])
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


_NAME = re.compile(r"(?P<leaf>.*)@version(?P<index>[1-9]\d*)", re.DOTALL)


def version_name(name: str, index: int) -> str:
    """Return the name of version `index` of a leaf."""
    return f"{name}@version{index}" if index else name


def split_version(name: str) -> tuple[str, int]:
    """Return the name of a leaf without its version, and the version.

    >>> split_version("params.w@version3"), split_version("params.w")
    (('params.w', 3), ('params.w', 0))
    """
    match = _NAME.fullmatch(name)
    return (name, 0) if match is None else (match["leaf"], int(match["index"]))


def nearest_version(name: str, have: Container[str]) -> str:
    """Return which of the versions of a leaf version r goes on from: of n that there are, r modulo n."""
    leaf, index = split_version(name)
    count = 1
    while version_name(leaf, count) in have:
        count += 1
    return version_name(leaf, index % count)
