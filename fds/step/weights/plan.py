"""What a stream of weights gathers: groups of one flat bucket each, the same in the same order on all ranks."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import StateError, is_a, is_int
from fds.state import State
from fds.step.all_stations import Stations
from fds.step.call import Call
from fds.step.sharding.transport import LOSSLESS
from fds.step.structure import Structure
from fds.step.views import decode

BUCKET_BYTES = 2**26
ALIGN = 64  # bytes, at which weights begin in a buffer
BUFFERS = -1  # the place of the group of module buffers


@attrs.frozen
class Kind:
    """What is known of a weight on all ranks: the dtype in which it is handed out, and its whole shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def like(self) -> Tensor:
        """Return it on `meta`."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@attrs.frozen
class Group:
    """Weights that are gathered together.

    Attributes:
        place: which ranks hold them: those with this coordinate along the axes that divide parameters.
        kinds: by name, in the order in which they are handed out.
        more: names of parameters that their views read, gathered with them.
    """

    place: int
    kinds: dict[str, Kind]
    more: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class Options:
    """What a stream of weights was asked for."""

    dtype: torch.dtype | None
    bucket_bytes: int
    view: bool

    def check(self, step: Stations) -> None:
        """Raise `StateError` for anything but these options."""
        if self.dtype is not None and not (is_a(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            want = "torch.bfloat16, another floating-point dtype, or None"
            raise StateError("weights are of no such dtype", where="dtype", got=repr(self.dtype)[:60], want=want)
        if not is_int(self.bucket_bytes, 1):
            got, want = repr(self.bucket_bytes)[:60], "a number of bytes, 1 or more"
            raise StateError("weights: not a size of memory", where="bucket_bytes", got=got, want=want)
        if not is_a(self.view, bool):
            raise StateError("weights: not a boolean", where="view", got=repr(self.view)[:60], want="True or False")
        if self.view and step.shard is not None and step.gather.transport is not LOSSLESS:
            raise StateError(
                "weights: the loss sees what is rounded on its way, a bucket at a time",
                where="view",
                got=f"view=True with {step.gather.transport!r}",
                want="view=False, the parameters as the state holds them",
            )


def place_of(step: Stations) -> int:
    """Return which of the different sets of whole parameters this rank holds."""
    index = 0
    for axis, _ in step.dimensions.owned:
        index = index * axis.size + axis.index
    return index


def together(step: Stations, error: Exception | None, mine: Any) -> list[Any]:
    """Return what all ranks send, in order. Raises, on all of them, what failed on one, and for texts that differ."""
    everyone = step.everyone
    if error is not None and everyone is None:
        raise error
    if everyone is None:
        return [mine]
    fields = None if error is None else f"{type(error).__name__}: {error}"[:1000]
    replies = everyone.exchange([fields, mine], "weights")
    if error is not None:
        raise error
    for rank, (failed, _) in zip(everyone.ranks, replies, strict=True):
        if failed is not None:
            raise StateError("weights: another rank cannot take part", where=f"rank {rank}", got=failed)
    theirs = [value for _, value in replies]
    other = next((rank for rank, x in zip(everyone.ranks, theirs, strict=True) if x != theirs[0]), None)
    if is_a(mine, str) and other is not None:
        raise StateError(
            "weights: ranks ask for different ones",
            where=f"rank {other}",
            got="other names=, dtype=, bucket_bytes= or view=",
            want=f"those of rank {everyone.ranks[0]}",
            hint="a rank that needs none closes what it gets: step.weights(state, ...).close()",
        )
    return theirs


def agreed(step: Stations, mine: list[Group], error: Exception | None) -> list[Group]:
    """Return the groups of all places, one after another, and last the module buffers; no weight twice."""
    if not step.dimensions.owned:
        together(step, error, None)
        return mine
    sent = [[g.place, [[n, str(k.dtype)[6:], k.shape] for n, k in g.kinds.items()], g.more] for g in mine]
    by_place: dict[int, list[Any]] = {}
    for place, theirs in together(step, error, [place_of(step), sent]):
        by_place.setdefault(place, theirs)
    groups, seen = list[Group](), set[str]()
    for place, kinds, more in (group for _, theirs in sorted(by_place.items()) for group in theirs):
        new = {n: Kind(getattr(torch, dtype), tuple(shape)) for n, dtype, shape in kinds if n not in seen}
        seen |= new.keys()
        groups.append(Group(place, new, tuple(more)))
    buffers = {name: kind for group in groups if group.place == BUFFERS for name, kind in group.kinds.items()}
    return [*(group for group in groups if group.place != BUFFERS), Group(BUFFERS, buffers)]


def groups_of(step: Stations, state: State, structure: Structure, options: Options) -> list[Group]:
    """Return what this rank holds, in groups that take no more memory than half of what the options allow.

    Half, since a consumer still has a weight of one group when it asks for the first of the next.
    """
    call, place, groups = step.call(state, training=False), place_of(step), list[Group]()
    shapes = step.dimensions.shapes({name: leaf.shape for name, leaf in structure.leaves.items()})
    beside = _beside(step, structure) if options.view else frozenset[str]()
    copied = options.view or bool(step.encodings)
    for names in _buckets(structure):
        size, kinds, more = 0, dict[str, Kind](), dict[str, None]()
        for name in names:
            if name in beside:
                continue
            leaf = structure.leaves[name]
            reads = _reads(step, structure, name, call) if options.view else []
            like = torch.empty(shapes[name], dtype=leaf.dtype, device="meta")
            whole_leaf = attrs.evolve(leaf, shape=tuple(like.shape))
            number = decode(step.encodings, like, whole_leaf, call) if step.encodings else like
            shape = tuple(number.shape)
            seen = step.gather.dtype_of(name, number.dtype) if options.view else number.dtype
            kind = Kind(_cast(seen, options.dtype), shape)
            num_bytes = sum(_moved(step, structure, n, options) for n in (name, *reads))
            num_bytes += kind.like().nbytes * (copied + 2 * step.dimensions.pieces)  # viewed; put together of pieces
            if kinds and size + num_bytes > options.bucket_bytes // 2:
                groups.append(Group(place, kinds, tuple(more)))
                size, kinds, more = 0, {}, {}
            size, kinds[name] = size + num_bytes, kind
            more |= dict.fromkeys(reads)
        if kinds:
            groups.append(Group(place, kinds, tuple(more)))
    buffers = {n: Kind(_cast(x.dtype, options.dtype), tuple(x.shape)) for n, x in state.buffers.items()}
    return [*groups, Group(BUFFERS, buffers)]


def _buckets(structure: Structure) -> list[tuple[str, ...]]:
    """Return the names of parameters by bucket; of those that are held whole, of all."""
    if structure.layout is None or not structure.sharded:
        return [structure.names]
    return [tuple(leaf.name for leaf in bucket.leaves) for bucket in structure.layout.buckets]


def _beside(step: Stations, structure: Structure) -> frozenset[str]:
    """Return the names of parameters that the loss lacks: what it sees of the others has them inside."""
    names, key = set[str](), torch.zeros(2, dtype=torch.int64, device="meta")
    for filler in step.added:
        for name, leaf in structure.leaves.items():
            names |= filler.beside(name, torch.empty(leaf.shape, dtype=leaf.dtype, device="meta"), key).keys()
    return frozenset(names & structure.leaves.keys())


def _reads(step: Stations, structure: Structure, name: str, call: Call) -> list[str]:
    """Return the names of other parameters that are in what the loss computes with, of one."""
    fillers: list[Any] = [x for x in (*step.views, *step.modules) if hasattr(x, "reads")]
    names = dict.fromkeys(n for filler in fillers for n in filler.reads(structure.leaves[name], call))
    return [n for n in names if n != name and n in structure.leaves]


def _cast(dtype: torch.dtype, to: torch.dtype | None) -> torch.dtype:
    return to if to is not None and dtype.is_floating_point else dtype


def wire(step: Stations, structure: Structure, name: str, options: Options) -> torch.dtype:
    """Return the dtype in which a parameter is sent."""
    leaf = structure.leaves[name]
    if step.encodings:
        return leaf.dtype
    return step.gather.dtype_of(name, leaf.dtype) if options.view else _cast(leaf.dtype, options.dtype)


def _moved(step: Stations, structure: Structure, name: str, options: Options) -> int:
    """Return the bytes that a parameter, or the largest piece of it, takes where it arrives."""
    num_bytes = structure.leaves[name].bound * wire(step, structure, name, options).itemsize
    return -(-num_bytes // ALIGN) * ALIGN
