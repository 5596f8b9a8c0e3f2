"""The structure of a parameter tree: names, which leaves are trained, and the flat slices an optimizer sees."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import StateError
from fds.layout import Layout, Leaf, Segment, Sharded
from fds.optim import Optimizer
from fds.optim.returned import first_slots
from fds.step.sharding.handles import BucketWindow
from fds.step.sharding.shard import Shard, shard_of
from fds.step.sharding.transport import Transport
from fds.step.topology import Dimensions
from fds.step.whole_parameters import check_whole, with_pieces

T = TypeVar("T")


@attrs.frozen
class Casts:
    """In what dtype the loss sees parameters, None for that in which they are held."""

    dtype: torch.dtype | None = None
    float32: tuple[str, ...] = ()  # patterns of parameters that stay as they are

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the loss sees a parameter that is held in `dtype`."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point and self.casts(name) else dtype

    def casts(self, name: str) -> bool:
        """Say whether the parameter of this name is cast."""
        return not any(fnmatch.fnmatchcase(name, p) for p in self.float32)


@attrs.frozen
class AllBut:
    """In the station `frozen`: every parameter but those whose names match a pattern."""

    patterns: tuple[str, ...]

    def __str__(self) -> str:
        return f"all but {tree.named(self.patterns)}"


@attrs.frozen
class Slot:
    """What a state holds under a slot of the optimizer."""

    names: tuple[str, ...]  # of the parts that have it
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    has: tuple[bool, ...]  # of every trained part, whether it has this slot


@attrs.frozen(eq=False)
class Structure:
    """How a step sees parameters: the user's leaves by name, and the parts in which a state holds them.

    Unsharded the parts are the leaves; sharded they are this rank's slices of the buckets of `layout`.
    """

    names: tuple[str, ...]  # of the user's leaves, in order
    trained_names: tuple[str, ...]  # of those that are trained
    part_names: tuple[str, ...]  # of what a state holds, in order
    shapes: tuple[torch.Size, ...]  # of the parts
    trained: tuple[int, ...]  # indices of the parts that are trained
    build: Callable[[Sequence[Any]], Any]  # parts -> what `state.params` is
    build_whole: Callable[[Sequence[Any]], Any]  # whole leaves -> the user's tree
    segments: list[list[Segment]]  # of the trained parts
    layout: Layout | None  # of the slices in the state, or of the gradients alone; None where one rank does all
    sharded: bool
    casts: tuple[torch.dtype, ...] | None  # in which the loss sees the leaves, None where a state holds them so
    leaves: dict[str, Leaf]  # of every parameter its name, whole shape, dtype, and whether it is trained
    opt: dict[str, Slot]  # by slot of the optimizer
    optimizer: Optimizer  # of these parameters
    windows: list[list[BucketWindow]] = attrs.field(factory=list[Any], init=False, repr=False)  # of stage 3, by bucket

    @classmethod
    def of(
        cls,
        params: Any,
        *,
        gather: Casts,
        reduce: Transport,
        optimizer: Optimizer,
        frozen: Sequence[str | AllBut],
        dimensions: Dimensions,
        text: str,
    ) -> Structure:
        """Read the structure of a tree of tensors, or of `Sharded` ones, for a step of this `text`.

        Raises `StateError` for a leaf that is not a tensor, and parameters that were sharded in another way.
        """
        shard = shard_of(dimensions)
        if isinstance(params, Sharded):
            shapes = {leaf.name: leaf.shape for bucket in params.layout.buckets for leaf in bucket.leaves}
        else:
            shapes = {name: tuple(x.shape) for name, x in tree.paths(params).items() if isinstance(x, Tensor)}
        optimizer = optimizer.bound(dimensions.shapes(shapes))
        read = functools.partial(
            read_leaves,
            gather=gather,
            reduce=reduce,
            shard=shard,
            optimizer=optimizer,
            frozen=frozen,
            dimensions=dimensions,
        )
        if isinstance(params, Sharded):
            layout = params.layout
            by_name = {leaf.name: leaf for bucket in layout.buckets for leaf in bucket.leaves}
            shapes = {n: torch.empty(by_name[n].shape, dtype=by_name[n].dtype, device="meta") for n in layout.names}
            same = all(leaf == by_name[leaf.name] for leaf in read(shapes))
            if shard is None or not shard.slices_state or layout.num_ranks != shard.axis.size or not same:
                raise StateError(
                    "these parameters are sharded in another way",
                    where="params",
                    got=f"slices of {len(layout.buckets)} buckets for {layout.num_ranks} ranks",
                    want=f"those of {text}",
                    hint="ranks, optimizer groups, frozen and float32 parameters "
                    "decide on them; fds.save and fds.load carry a state over, step.params(state) gives whole ones",
                )
            return cls._of_layout(layout, shard, optimizer, dimensions)
        leaves = read(tree.paths(params))
        if shard is not None and shard.slices_state:
            return cls._of_layout(shard.plan(leaves, tree.structure(params)), shard, optimizer, dimensions)
        live = [leaf for leaf in leaves if leaf.trained]
        layout = None if shard is None else shard.plan(live, None)
        build, names = tree.flatten(params)[1], tuple(leaf.name for leaf in leaves)
        segments = [[Segment(leaf.name, leaf.shape, 0, leaf.numel)] for leaf in live]
        segments = with_pieces(segments, optimizer, dimensions)
        made = cls(
            names=names,
            trained_names=tuple(leaf.name for leaf in live),
            part_names=names,
            shapes=tuple(torch.Size(leaf.shape) for leaf in leaves),
            trained=tuple(i for i, leaf in enumerate(leaves) if leaf.trained),
            build=build,
            build_whole=build,
            segments=segments,
            layout=layout,
            sharded=False,
            casts=_casts(leaves, gather),
            leaves={leaf.name: leaf for leaf in leaves},
            opt={},
            optimizer=optimizer,
        )
        return made._with_slots([(leaf.numel, leaf.dtype) for leaf in live])

    @classmethod
    def _of_layout(cls, layout: Layout, shard: Shard, optimizer: Optimizer, dimensions: Dimensions) -> Structure:
        buckets = layout.buckets
        trained = {leaf.name for b in buckets if b.trained for leaf in b.leaves}
        made = cls(
            names=layout.names,
            trained_names=tuple(n for n in layout.names if n in trained),
            part_names=tuple(b.name for b in buckets),
            shapes=tuple(torch.Size((b.length,)) for b in buckets),
            trained=tuple(i for i, b in enumerate(buckets) if b.trained),
            build=lambda parts: Sharded(dict(zip((b.name for b in buckets), parts, strict=True)), layout),
            build_whole=tree.builder(layout.spec),
            segments=with_pieces([b.segments(shard.axis.index) for b in buckets if b.trained], optimizer, dimensions),
            layout=layout,
            sharded=True,
            casts=None,
            leaves={leaf.name: leaf for b in buckets for leaf in b.leaves},
            opt={},
            optimizer=optimizer,
        )
        return made._with_slots([(b.length, b.dtype) for b in buckets if b.trained])

    def _with_slots(self, flat: list[tuple[int, torch.dtype]]) -> Structure:
        """Return the same, knowing which slots the optimizer keeps."""
        params = [torch.empty(n, dtype=dtype, device="meta") for n, dtype in flat]
        places = [(self.part_names[i], self.shapes[i]) for i in self.trained]
        for slot, parts in first_slots(self.optimizer, self.segments, params).items():
            has = tuple(x is not None for x in parts)
            present = [(*place, x) for place, x in zip(places, parts, strict=True) if x is not None]
            shapes = tuple(shape if x.numel() == shape.numel() else torch.Size() for _, shape, x in present)
            self.opt[slot] = Slot(
                tuple(name for name, _, _ in present), shapes, tuple(x.dtype for *_, x in present), has
            )
        return self

    @functools.cached_property
    def is_trained(self) -> tuple[bool, ...]:
        """Of every name, whether it is trained."""
        return tuple(map(set(self.trained_names).__contains__, self.names))

    @property
    def largest(self) -> Structure:
        """The same where ranks have the largest pieces of parameters, for what all ranks decide alike: the shapes."""
        if all(leaf.bound == leaf.numel for leaf in self.leaves.values()):
            return self
        buckets = () if self.layout is None else self.layout.buckets
        most = [b.bound for b in buckets] if self.sharded else [self.leaves[name].bound for name in self.part_names]
        return attrs.evolve(self, shapes=tuple(torch.Size((n,)) for n in most))

    @property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the trained leaves by name."""
        return {name: self.leaves[name].shape for name in self.trained_names}

    @functools.cached_property
    def places(self) -> list[tuple[int, int]]:
        """Of every trained leaf, its bucket and which of the bucket's leaves it is; empty without buckets."""
        return [] if self.layout is None else [self.layout.places[name] for name in self.trained_names]

    @functools.cached_property
    def members(self) -> dict[int, list[int]]:
        """By bucket of trained leaves, which of them are in it, in its order."""
        members: dict[int, list[int]] = {}
        for k, (i, _) in sorted(enumerate(self.places), key=lambda pair: pair[1]):
            members.setdefault(i, []).append(k)
        return members

    @functools.cached_property
    def parts(self) -> dict[str, int]:
        """The index of every part, by its name."""
        return {name: i for i, name in enumerate(self.part_names)}

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The key path of every part in `state.params`, and in trees like it."""
        by_path = tree.paths(self.build(range(len(self.part_names))))
        return tuple(sorted(by_path, key=by_path.__getitem__))

    def like_parts(self, x: Any) -> list[Tensor]:
        """Return the leaves of a tree like `state.params`, in the order of the parts."""
        named = tree.paths(x)
        return [named[path] for path in self.paths]

    def inside(self, part: int) -> tuple[str, ...]:
        """Return the names of the parameters in a part."""
        if not self.sharded:
            return (self.part_names[part],)
        assert self.layout is not None
        return tuple(leaf.name for leaf in self.layout.buckets[part].leaves)

    def hold(
        self,
        leaves: Iterable[tuple[str, Tensor]],
        index: int,
        settle: Callable[[int, Tensor], Tensor] = lambda part, x: x,
    ) -> Any:
        """Return what a state holds, from (name, whole leaf) one after another: all, or slice `index` of each bucket.

        Leaves are taken over where they are held whole, else copied from; `settle` moves each part to where it is to
        live.
        """
        if not self.sharded:
            at = {name: i for i, name in enumerate(self.part_names)}
            named = {name: settle(at[name], leaf) for name, leaf in leaves}
            return self.build([named[name] for name in self.names])
        assert self.layout is not None
        places = {s.name: (i, s) for i, b in enumerate(self.layout.buckets) for s in b.segments(index)}
        parts: list[Any] = [None] * len(self.part_names)
        missing = [len(bucket.leaves) for bucket in self.layout.buckets]
        for name, leaf in leaves:
            i, s = places[name]
            if parts[i] is None:
                parts[i] = leaf.new_zeros(self.shapes[i])
            s.of(parts[i]).copy_(leaf.reshape(-1)[s.start : s.start + s.length])
            missing[i] -= 1
            if not missing[i]:  # a slice that is complete leaves for where it lives
                parts[i] = settle(i, parts[i])
        return self.build(parts)

    def pick(self, parts: Sequence[Any]) -> list[Any]:
        """Return those of all parts that are trained."""
        return list(map(parts.__getitem__, self.trained))

    def put(self, parts: Sequence[Tensor], trained: Sequence[Tensor]) -> Any:
        """Return what `state.params` is with the trained parts replaced."""
        out = list(parts)
        for i, x in zip(self.trained, trained, strict=True):
            out[i] = x
        return self.build(out)

    def align(self, slots: Sequence[T]) -> dict[str, list[T | None]]:
        """Return the optimizer's slots, given all tensors of all of them: one per trained part, None without."""
        rest = iter(slots)

        def take(has: tuple[bool, ...]) -> list[T | None]:
            return [*islice(rest, len(has))] if all(has) else [next(rest) if is_there else None for is_there in has]

        return {name: take(slot.has) for name, slot in self.opt.items()}

    def name_slots(self, opt: dict[str, list[Tensor | None]]) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's flat slices as tensors under the names of their parts."""
        present = {slot: [x for x in parts if x is not None] for slot, parts in opt.items()}
        return {
            slot: {
                name: x.view(shape).data for name, shape, x in zip(want.names, want.shapes, present[slot], strict=True)
            }
            for slot, want in self.opt.items()
        }


def read_leaves(
    named: dict[str, Any],
    *,
    gather: Casts,
    reduce: Transport,
    shard: Shard | None,
    optimizer: Optimizer,
    frozen: Sequence[str | AllBut],
    dimensions: Dimensions,
) -> list[Leaf]:
    """Return what the layout depends on of every leaf. Raises `StateError` for one that is not a real tensor."""
    slices = shard is not None and shard.slices_state
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise StateError("a parameter is not a tensor", where=name, got=repr(x)[:60], want="a tensor")
        if x.is_complex():
            raise StateError(
                "a parameter is complex",
                where=name,
                got=str(x.dtype),
                want="a real dtype",
                hint="keep real and imaginary part: torch.view_as_real",
            )
    names = dimensions.names(tuple(named))
    still = frozen_names(frozen, names)
    reduce.check(names)
    leaves: list[Leaf] = []
    for name, x in named.items():
        trained = tree.is_float(x) and name not in still
        if trained:
            check_whole(optimizer, dimensions, name, x.shape)
        _, most = dimensions.extremes(name, x.shape)
        group = optimizer.group(name) if trained else None
        stays = shard is not None and shard.persists(most)
        way, unit = reduce.grouping(name, tuple(x.shape)) if trained else (None, 1)
        kind = (group, gather.casts(name), stays, dimensions.kind(name), way)
        whole = slices and trained and optimizer.needs_whole(name)
        leaves.append(Leaf(name, tuple(x.shape), x.dtype, trained, kind, whole, unit, most))
    return leaves


def frozen_names(frozen: Sequence[str | AllBut], names: Sequence[str]) -> set[str]:
    """Return the names of parameters that are not trained. Raises `StateError` for a pattern that matches none."""
    still = tree.match([pattern for pattern in frozen if isinstance(pattern, str)], names, what="freeze")
    for pattern in frozen:
        if isinstance(pattern, AllBut):
            still |= set(names) - tree.match(pattern.patterns, names, what="freeze(all_but=...)")
    return still


def _casts(leaves: Sequence[Leaf], gather: Casts) -> tuple[torch.dtype, ...] | None:
    seen = tuple(gather.dtype_of(leaf.name, leaf.dtype) for leaf in leaves)
    return None if seen == tuple(leaf.dtype for leaf in leaves) else seen


def contiguous_copy(x: Tensor) -> Tensor:
    """Return a detached contiguous copy."""
    return x.detach().clone(memory_format=torch.contiguous_format)
