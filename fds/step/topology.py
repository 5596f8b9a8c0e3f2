"""The station `topology`: the axes that share a step, and for each how the parameters lie along it.

Who shares the step, whose squares count in a norm, which batches differ, which draws differ, what a bucket may mix and
how a save is cut all follow from these records; see `Dimensions`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, get_args

import attrs
from torch import Tensor

from fds import tree
from fds.collectives import Axis
from fds.collectives.functional import copy_in
from fds.errors import ComposeError, is_a
from fds.layout import Segment
from fds.step.placements import Local, Owned, Placement, Range, Replicated, SplitDim

Role = Literal["stage", "local", "data", "sequence", "tensor"]
ROLES: tuple[Role, ...] = get_args(Role)  # in which ranks are numbered, the last varies fastest
Place = tuple[int, ...]  # coordinates on some axes of a mesh
# How parameters may lie along an axis: what its ranks do makes gradients equal, parts of a sum, or each rank's own.
_RANKS: dict[Role, tuple[str, tuple[type, ...], tuple[str, ...]]] = {
    "stage": ("run other layers of the same rows", (Owned,), ("sum",)),
    "local": ("pass other rows, and make updates of their own", (Local,), ()),
    "data": ("pass other rows", (SplitDim, Owned), ("sum",)),
    "sequence": ("pass other tokens of the same rows", (SplitDim, Owned), ("sum",)),
    "tensor": ("pass the same rows, and compute one loss", (SplitDim, Owned), ("same", "sum")),
}
PASSING: tuple[Role, ...] = ("data", "sequence")  # of one update, in which ranks pass other batches


@attrs.frozen(repr=False)
class Dimension:
    """An axis that shares a step, what it is for, and how parameters lie along it.

    The axis is None where one process plays all of its ranks.
    """

    axis: Axis | None
    role: Role
    placement: Placement = attrs.field(factory=Placement)

    def __attrs_post_init__(self) -> None:
        if self.axis is not None and not is_a(self.axis, Axis):
            raise ComposeError(
                "a dimension has an axis",
                where="station 'topology'",
                got=repr(self.axis)[:80],
                want="fds.step.Dimension(axis, role, placement), the axis from a mesh: mesh['tp']",
                hint="axis and role have changed places" * is_a(self.axis, str),
            )
        if not is_a(self.placement, Placement):
            raise ComposeError(
                "a dimension has a placement",
                where="station 'topology'",
                got=repr(self.placement)[:80],
                want="an fds.step.Placement",
                hint="an object of it, not the class" if is_a(self.placement, type) else "",
            )
        if self.axis is not None and self.axis.size > 1 and self.placement.axis is None:
            raise ComposeError(
                "a placement does not know its axis",
                where=f"station 'topology', {self!r}",
                got=type(self.placement).__name__,
                want="a Placement whose attribute `axis` is the axis",
            )
        if self.axis is not None and self.placement.axis is not None:
            axis, ranks = self.placement.axis, self.axis.ranks
            if axis.ranks != ranks and not (
                self.batches and set(axis.ranks) <= set(ranks)
            ):  # or slices of some of them
                raise ComposeError(
                    "a placement is of another axis than its dimension",
                    where=f"station 'topology', {self!r}",
                    got=f"{type(self.placement).__name__}.axis: {axis.name!r}",
                    want=repr(self.axis.name),
                )

    def __repr__(self) -> str:
        ranks = "one process" if self.axis is None else f"{self.axis.name} ({self.axis.size} ranks)"
        how = repr(self.placement)
        return f"{self.role} over {ranks}" + (f": {how}" if how else "")

    def kind(self, name: str) -> Hashable:
        """Return what a parameter may share a bucket with. Raises `ComposeError` where it lies as no rank's work is."""
        kind, lies = self.placement.kind(name), self.placement.lies(name)
        does, kinds, grads = _RANKS[self.role]
        fits = lies.grads in grads if isinstance(lies, Replicated) else isinstance(lies, kinds)
        if self.axis is not None and self.placement.axis is not None and not fits:
            raise ComposeError(
                "a placement contradicts the role of its axis",
                where=f"station 'topology', {self!r}: {name}",
                got=f"{lies}, where ranks {does}",
                want=" or ".join([type_.__name__ for type_ in kinds] + [f"Replicated({word!r})" for word in grads]),
                hint="of other rows every rank has another gradient, which is a part of the sum"
                if self.batches and isinstance(lies, Replicated)
                else "",
            )
        return kind

    @property
    def batches(self) -> bool:
        """Whether ranks along the axis pass different batches, or different parts of the same rows."""
        return self.role in PASSING

    @property
    def repeats(self) -> bool:
        """Whether ranks along the axis compute the same losses and metrics, of which one rank's count."""
        return self.role == "tensor"


@attrs.frozen
class Dimensions:
    """What follows from the dimensions of a step, for one rank of it.

    Attributes:
        entries: the dimensions, in the order of `ROLES`, but for sequences whose ranks are data ranks too.
        everyone: the ranks that share the step, None for one rank alone.
        data: those of them that hold the same parameters and pass other batches, or other parts of the same rows; None
            where all pass the same.
        local: those of them that pass other batches and have parameters of their own, which they make equal now and
            then; None where there are none.
        group: the ranks that make one update together: everyone but for those.
        peers: the ranks that pass other batches, of all these kinds.
        sequence: the ranks that pass parts of the same rows, None where rows are whole.
        source: all dimensions, from which this follows.
    """

    entries: tuple[Dimension, ...] = ()
    everyone: Axis | None = None
    data: Axis | None = None
    local: Axis | None = None
    group: Axis | None = None
    peers: Axis | None = None
    sequence: Axis | None = None
    source: tuple[Dimension, ...] = ()

    @classmethod
    def of(cls, dimensions: Sequence[Dimension]) -> Dimensions:
        """Put dimensions together. Raises `ComposeError` for axes of two meshes, or one in two roles."""
        other = next((dimension.role for dimension in dimensions if dimension.role not in ROLES), None)
        if other is not None:
            raise ComposeError(
                "there is no such role of an axis",
                where="station 'topology'",
                got=repr(other),
                want=", ".join(map(repr, ROLES)),
            )
        ordered = tuple(sorted(dimensions, key=lambda dimension: ROLES.index(dimension.role)))
        sequence = _joined(
            [dimension.axis for dimension in ordered if dimension.role == "sequence" and dimension.axis is not None]
        )
        entries = tuple(dimension for dimension in ordered if not _is_inside(dimension, ordered))
        real = [(dimension.axis, dimension.role) for dimension in entries if dimension.axis is not None]
        everyone = _joined([axis for axis, _ in real])
        data, local = (_joined([axis for axis, role in real if role in want]) for want in (PASSING, ("local",)))
        if local is None:
            data = everyone if data == everyone else data  # one message reaches both
            return cls(entries, everyone, data, None, everyone, data, sequence, ordered)
        group = _joined([axis for axis, role in real if role != "local"])
        peers = _joined([axis for axis, role in real if role in ("local", *PASSING)])
        return cls(entries, everyone, data, local, group, peers, sequence, ordered)

    def holding(self, encodings: Sequence[Any]) -> Dimensions:
        """Return the same for parameters that these views may encode."""
        if not encodings:
            return self
        entries = [attrs.evolve(entry, placement=entry.placement.holding(encodings)) for entry in self.entries]
        return attrs.evolve(self, entries=tuple(entries))

    @functools.cached_property
    def owned(self) -> list[tuple[Axis, Placement]]:
        """The axes along which ranks hold different parameters, whole ones."""
        return [
            (entry.axis, entry.placement) for entry in self.entries if entry.axis is not None and entry.placement.owns
        ]

    @functools.cached_property
    def differing(self) -> list[tuple[Axis, Placement]]:
        """The axes along which ranks hold different parameters, or pieces of them."""
        return [
            (entry.axis, entry.placement)
            for entry in self.entries
            if entry.axis is not None and entry.placement.differs
        ]

    @functools.cached_property
    def split(self) -> tuple[Axis, ...]:
        """The axes over which what the optimizer gets is split."""
        return tuple(axis for entry in self.entries for axis in entry.placement.split)

    @functools.cached_property
    def coordinates(self) -> tuple[int, ...]:
        """Where this rank is among those that hold other slices or parameters: what draws for them differs by it."""
        split = self.split
        others = (axis for axis, placement in self.owned if not placement.split)
        return tuple(axis.index for axis in (*split, *others))

    @functools.cached_property
    def repeats(self) -> tuple[int, int]:
        """Of the ranks that compute the same losses, which one this is, and how many they are: the first's count."""
        index, count = 0, 1
        for entry in self.entries:
            if entry.repeats and entry.axis is not None:
                index, count = index * entry.axis.size + entry.axis.index, count * entry.axis.size
        return index, count

    @functools.cached_property
    def tells(self) -> bool:
        """Whether this rank's losses and metrics count."""
        return self.repeats[0] == 0

    def repeated(self, names: Sequence[str]) -> frozenset[str]:
        """Return those parameters of which another rank that computes the same losses has the same elements."""
        others = [
            entry.placement for entry in self.entries if entry.repeats and entry.axis is not None and entry.axis.index
        ]
        return frozenset(n for n in names if any(not isinstance(entry.lies(n), SplitDim) for entry in others))

    @functools.cached_property
    def share_of_batch(self) -> tuple[int, int]:
        """Which rows of the global batch this rank passes, or parts of, and how many such shares there are."""
        if self.peers is None or self.sequence is None:
            return (0, 1) if self.peers is None else (self.peers.index, self.peers.size)
        index, count = 0, 1
        for name in _names(self.peers):
            if name not in _names(self.sequence):
                axis = self.peers.mesh[name]
                index, count = index * axis.size + axis.index, count * axis.size
        return index, count

    @functools.cached_property
    def shares(self) -> list[tuple[Place, Place]]:
        """Of each of `everyone`: where it is among those that pass other rows, and among those that cut these."""
        if self.everyone is None:
            return []
        cut: set[str] = set() if self.sequence is None else {*_names(self.sequence)}
        apart: set[str] = set() if self.peers is None else {*_names(self.peers)} - cut
        places: list[dict[str, int]] = [self.everyone.mesh.coordinate(rank) for rank in self.everyone.ranks]
        pick: Callable[[dict[str, int], set[str]], Place] = lambda at, names: tuple(at[n] for n in at if n in names)
        return [(pick(place, apart), pick(place, cut)) for place in places]

    @functools.cached_property
    def shares_rows(self) -> bool:
        """Whether some ranks pass the same rows, or parts of them."""
        return len({rows for rows, _ in self.shares}) < len(self.shares)

    @property
    def place(self) -> int:
        """Which of the different sets of parameters this rank holds."""
        index = 0 if self.local is None else self.local.index
        for axis, _ in self.owned:
            index = index * axis.size + axis.index
        return index

    @property
    def slice(self) -> int:
        """Which slice of every flat bucket this rank holds."""
        return next((i for entry in self.entries if (i := entry.placement.slice) is not None), 0)

    @property
    def pieces(self) -> bool:
        """Whether ranks may hold pieces of parameters."""
        return any(not placement.owns for _, placement in self.differing)

    def copies(self, name: str | None, *, sliced: bool) -> list[tuple[int, int]]:
        """Of the ranks along each dimension that hold the same elements of a leaf, which one this is, and how many.

        See `Placement.copies`.
        """
        return [entry.placement.copies(name, sliced=sliced) for entry in self.entries]

    def terms(self, name: str) -> tuple[int, int, bool]:
        """Of the ranks whose gradients of a parameter add up to its gradient, which one this is, and how many.

        What a rank remembers of its own gradients is one term of a sum. Ranks with equal gradients have equal terms:
        the last value says whether this rank is the first of those.
        """
        index, count, first = 0, 1, True
        for axis, lies in (
            (entry.axis, entry.placement.lies(name)) for entry in self.entries if entry.axis is not None
        ):
            if lies == Replicated("same"):
                first = first and axis.index == 0
                continue
            ranks = lies.ranks if isinstance(lies, Owned) else range(1 if isinstance(lies, SplitDim) else axis.size)
            mine = 0 if isinstance(lies, SplitDim) else ranks.index(axis.index)
            index, count = index * len(ranks) + mine, count * len(ranks)
        return index, count, first

    def cells(self, name: str, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[tuple[Range, ...], ...]] | None:
        """Return the whole shape of a parameter of which this rank holds a piece of `shape`, and its ranges by dim.

        A piece of several parts has several ranges along a dim. None where this rank holds all of it.
        """
        cuts = [
            (axis, lies) for axis, placement in self.differing if isinstance(lies := placement.lies(name), SplitDim)
        ]
        if not cuts:
            return None
        whole = list(shape)
        ranges: list[tuple[Range, ...]] = [((0, n),) for n in shape]
        for axis, lies in reversed(cuts):
            dim, range_ = lies.dim, ranges[lies.dim]
            whole[dim] = lies.whole(whole[dim], axis.size)
            ranges[dim] = _ranges_of(lies.ranges(whole[dim], axis.size, axis.index), range_)
        return tuple(whole), tuple(ranges)

    def extremes(self, name: str, shape: Sequence[int]) -> tuple[int, int]:
        """Return the elements of the smallest and of the largest piece of a parameter, given the shape of this rank's.

        The first ranks have the largest pieces, the last ones the smallest.
        """
        cells = self.cells(name, shape)
        if cells is None:
            return math.prod(shape), math.prod(shape)
        least, most = list(cells[0]), list(cells[0])
        for axis, placement in self.differing:
            if isinstance(lies := placement.lies(name), SplitDim):
                for sizes, index in ((least, axis.size - 1), (most, 0)):
                    sizes[lies.dim] = sum(n for _, n in lies.ranges(sizes[lies.dim], axis.size, index))
        return math.prod(least), math.prod(most)

    @property
    def replica(self) -> int:
        """Which of the versions of the same parameters this rank holds, which ranks make equal now and then."""
        return 0 if self.local is None else self.local.index

    def names(self, names: Sequence[str]) -> Sequence[str]:
        """Return the names of all parameters, given those that this rank holds."""
        for entry in self.entries:
            names = entry.placement.names(names)
        return names

    def shapes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the whole shapes of all parameters by name, given those of the ones that this rank holds."""
        for entry in reversed(self.entries):
            shapes = entry.placement.shapes(shapes)
        return shapes

    def holds(self, name: str) -> bool:
        """Say whether this rank holds a parameter, or a buffer."""
        return all(entry.placement.holds(name) for entry in self.entries)

    def kind(self, name: str) -> Hashable:
        """Return what a parameter may share a bucket with: others of this kind."""
        return tuple(entry.kind(name) for entry in self.entries)

    def share(self, name: str, x: Tensor) -> None:
        """Give a new parameter the values that it has on the first of the ranks that hold it, in place."""
        for _, placement in self.differing:
            placement.share(name, x)

    def cut(self, name: str, x: Tensor) -> Tensor:
        """Return this rank's piece of a whole parameter, or buffer, a view; see `Placement.cut`."""
        for _, placement in self.differing:
            x = placement.cut(name, x)
        return x

    def part_of(self, whole: Any) -> Any:
        """Return the part of a tree of whole parameters that this rank holds."""
        if not self.differing:
            return whole
        params = {name: x for name, x in tree.paths(whole).items() if self.holds(name)}
        params = {name: self.cut(name, x) if isinstance(x, Tensor) else x for name, x in params.items()}
        return params if self.owned else tree.flatten(whole)[1](list(params.values()))

    def add_up(
        self, grads: Sequence[Tensor], segments: Sequence[Sequence[Segment]], *, summed: bool = True
    ) -> list[bool]:
        """Sum the gradients of what several ranks hold, in place; say for each whether this rank's counts in norms.

        Those of all data ranks count that are not `summed` over them. A bucket never mixes kinds, so its first
        parameter speaks for all of it.
        """
        if not self.entries:
            return [True] * len(grads)
        firsts = [inside[0].name if inside else None for inside in segments]
        for _, placement in self.differing:
            for grad, name in zip(grads, firsts, strict=True):
                if name is not None:
                    placement.add_up(name, grad)
        counted = [True] * len(firsts)
        for entry in self.entries if summed else (entry for entry in self.entries if not entry.batches):
            counted = [a and b for a, b in zip(counted, entry.placement.counts(firsts), strict=True)]
        return counted

    def read_by(self, name: str, other: str, x: Tensor) -> Tensor:
        """Return a parameter as the view of another one, called `name`, reads it.

        Where ranks have terms of the gradient that the view passes on, and must have it alike, it is their sum.
        Raises `ComposeError` where they have alike what would be summed once more.
        """
        for axis, placement in self.differing:
            viewed, read = placement.lies(name), placement.lies(other)
            if read == Replicated("same") and (isinstance(viewed, SplitDim) or viewed == Replicated("sum")):
                x = copy_in(x, axis)
            elif read == Replicated("sum") and viewed == Replicated("same"):
                raise ComposeError(
                    "a view has the same gradient on all ranks, for a parameter of which they sum gradients",
                    where=f"station 'view', {name}",
                    got=f"{other}: {read} along {axis.name!r}",
                    want=f"a parameter that lies as {name} does: {viewed}",
                )
        return x

    def is_late(self, name: str) -> bool:
        """Say whether other ranks add to the gradient of a parameter after backward; see `add_up`."""
        layouts = [placement.lies(name) for _, placement in self.differing]
        return any(
            layout == Replicated("sum") or (isinstance(layout, Owned) and len(layout.ranks) > 1) for layout in layouts
        )

    def collect(self, parts: Any) -> Any:
        """Return a tree of all whole parameters, or buffers, on every rank, given what each holds."""
        for _, placement in reversed(self.differing):
            parts = placement.collect(parts)
        return parts


def _names(axis: Axis) -> list[str]:
    """Return the names of the axes of which one was flattened."""
    return axis.name.split(",")


def _is_inside(dimension: Dimension, entries: Sequence[Dimension]) -> bool:
    """Say of a sequence's dimension whether its ranks are data ranks too, which sum gradients over all of them."""
    if dimension.role != "sequence" or dimension.axis is None:
        return False
    data = {name for other in entries if other.role == "data" and other.axis for name in _names(other.axis)}
    return data.issuperset(_names(dimension.axis))


def _ranges_of(pieces: Sequence[Range], inside: Sequence[Range]) -> tuple[Range, ...]:
    """Return what is `inside`, as ranges along the dim of which `pieces` are put together to that."""
    ranges: list[Range] = []
    at = 0
    for first, n in pieces:
        for low, length in inside:
            start, end = max(low, at), min(low + length, at + n)
            if start < end:
                ranges.append((first + start - at, end - start))
        at += n
    return tuple(ranges)


def _joined(axes: list[Axis]) -> Axis | None:
    """Return the ranks of all axes together. Raises `ComposeError` where they are not of one mesh, or the same."""
    if len(axes) < 2:
        return axes[0] if axes else None
    names = [name for axis in axes for name in _names(axis)]
    if any(axis.mesh != axes[0].mesh for axis in axes) or len(set(names)) < len(names):
        raise ComposeError(
            "these axes are not two axes of one mesh",
            got=" and ".join(repr(axis.name) for axis in axes),
            want='mesh = fds.mesh(pp=2, dp=-1); pipeline(..., mesh["pp"]), shard_optimizer(mesh["dp"])',
        )
    return axes[0].mesh[tuple(names)].channel("step")
