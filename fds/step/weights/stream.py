"""`Step.weights`: whole weights one after another, in an order of collectives that no consumer changes.

All ranks that share a step gather the same groups of weights in the same order. A rank whose consumer stops takes part
in the rest all the same: when its `Weights` is closed or let go of, or when the step is asked for anything else that
all ranks do together.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Work, fingerprint
from fds.errors import StateError
from fds.layout import Leaf
from fds.state import State
from fds.step.all_stations import Stations
from fds.step.checks.agreement import same_composition
from fds.step.checks.state_check import graphless, usable
from fds.step.into import whole_leaves
from fds.step.pool import Scratch
from fds.step.residency.contract import deferred, hear
from fds.step.residency.lives import Masters
from fds.step.sharding.transport import LOSSLESS
from fds.step.stations import chosen_kernels
from fds.step.structure import Structure
from fds.step.views import decode
from fds.step.weights.names import Renamed, renamed
from fds.step.weights.plan import ALIGN, BUFFERS, Group, Options, agreed, groups_of, place_of, together, wire

MOST_MESSAGES = 8  # of ranges of buckets, that are under way at once

Named = dict[str, Tensor]


class Weights(Iterator[tuple[str, Tensor]]):
    """Whole weights by name, one after another: what `Step.weights` returns.

    Attributes:
        likes: by name, in order, what each is like, on `meta`.
    """

    def __init__(self, stream: Stream, likes: Named) -> None:
        self._stream, self.likes, self._thread = stream, likes, threading.get_ident()

    def __iter__(self) -> Weights:
        return self

    def __next__(self) -> tuple[str, Tensor]:
        """Return the next one. Raises `StateError` where the step was asked for something else meanwhile."""
        return self._stream.next()

    def close(self) -> None:
        """Take part in what is left, so that no other rank waits, and hand out nothing more."""
        self._stream.end("it was closed")

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A cycle may be collected in any thread, and only its own knows its rank: the step's next call then ends it.
        stream: Stream | None = getattr(self, "_stream", None)
        if stream is not None and not sys.is_finalizing() and threading.get_ident() == self._thread:
            stream.end("it was let go of")

    def __repr__(self) -> str:
        return f"<Weights: {len(self.likes)}>"


@graphless
def weights(step: Stations, state: State, names: Any, options: Options) -> Weights:
    """Return the weights of a state; see `Step.weights`. All ranks agree on what they are to gather."""
    same_composition(step)
    mine, opened, error = list[Group](), None, None
    try:
        usable(state, "weights")
        options.check(step)
        structure, parts = step.held_by(state)
        residency = deferred(step.place.residency, step.everyone)
        opened = structure, step.masters(structure, parts, state.step.device, residency)
        mine = groups_of(step, state, structure, options)
    except Exception as caught:
        error = caught
    groups = agreed(step, mine, error)
    assert opened is not None
    chosen, likes = dict[str, Renamed](), Named()
    try:
        chosen, likes = renamed(names, {name: kind.like() for group in groups for name, kind in group.kinds.items()})
    except Exception as caught:
        error = caught
    together(step, error, fingerprint([repr(options), [[*group.kinds] for group in groups], [*chosen]]))
    left = [attrs.evolve(g, kinds={n: k for n, k in g.kinds.items() if n in chosen}) for g in groups]
    stream = Stream(step, state, *opened, options, chosen, deque(group for group in left if group.kinds))
    if step.everyone is not None:
        step.runtime.under_way.append(stream.end)
    return Weights(stream, likes)


@attrs.define(eq=False)
class Stream:
    """The groups that are left, what is under way of the next one, and weights that have arrived."""

    step: Stations
    state: State
    structure: Structure
    masters: Masters
    options: Options
    chosen: dict[str, Renamed]
    left: deque[Group]
    ready: deque[Callable[[], list[tuple[str, Tensor]]]] = tree.new(deque)
    out: deque[tuple[str, Tensor]] = tree.new(deque)
    coming: Arriving | None = None  # of the first group that is left
    buffers: list[Scratch] = tree.new(list)
    over: str = ""  # why it has ended

    def next(self) -> tuple[str, Tensor]:
        """Return the next weight."""
        if self.over:
            raise StateError(
                "weights: there is nothing more to be had, for all ranks have gone on",
                where="weights",
                got=self.over,
                want="all of them, before the step is asked for something else",
            )
        while not self.out:
            if not self.ready:
                if not self.left:
                    self._forget()
                    raise StopIteration
                self._load()
            try:
                self.out += self.ready.popleft()()
            except BaseException as error:  # of a function of names: the other ranks know nothing of it
                self.end(f"{type(error).__name__}: {error}"[:200])
                raise
        self._ahead()
        return self.out.popleft()

    @graphless
    def end(self, why: str = "the step was asked for something else") -> None:
        """Take part in what is left, and hand out nothing more; a second time do nothing."""
        if self.over or not (self.left or self.ready or self.out):
            self._forget()
            return
        self.over = why
        self.ready.clear()
        self.out.clear()
        while self.left and self.step.everyone is not None:
            self._load()
            self.ready.clear()
        self._forget()

    def _forget(self) -> None:
        if self.end in self.step.runtime.under_way:
            self.step.runtime.under_way.remove(self.end)

    def _load(self) -> None:
        """Gather the next group, and let its weights be ready. What it raises, it raises on all ranks, or for good."""
        try:
            self._arrive(self.left[0])
        except BaseException as error:
            self.over = self.over or f"{type(error).__name__}: {error}"[:200]
            self.left.clear()
            self._forget()
            raise
        self.left.popleft()

    @graphless
    def _arrive(self, group: Group) -> None:
        arriving, self.coming = self.coming or self._begin(group), None
        arriving.wait()
        hear(self.masters.residency)
        self.state.check("weights")
        if group.place == BUFFERS:
            whole: Named = self.step.dimensions.collect(self.state.buffers)
            self.ready += [functools.partial(self._made, n, whole[n].clone) for n in group.kinds]
            return
        arrived = arriving.weights
        if self.options.view and arrived:
            arrived = self._seen(arrived)
        if self.step.dimensions.differing:
            arrived = self.step.dimensions.collect(arrived)
        for change in self.step.modules if self.options.view else ():
            if (bake_parameters := getattr(change, "bake_parameters", None)) is not None:
                arrived = bake_parameters(arrived)
        leaves = whole_leaves(self.step, self.structure, arrived)
        numbers = {n: functools.partial(self._decoded, arrived[n], leaves[n]) for n in group.kinds}
        self.ready += [functools.partial(self._made, n, make) for n, make in numbers.items()]

    @graphless
    def _ahead(self) -> None:
        """Begin to gather the next group, where that is in one message and its memory is free already."""
        if self.coming is None and self.left and self.structure.sharded and not self.masters.elsewhere:
            group = self.left[0]
            if group.place == place_of(self.step) and len(self.buffers) > 1 and any(b.is_alone() for b in self.buffers):
                self.coming = self._begin(group)

    @graphless
    def _made(self, name: str, make: Callable[[], Tensor]) -> list[tuple[str, Tensor]]:
        """Return a weight under its new names."""
        x = make()
        x = x.to(self.options.dtype) if self.options.dtype is not None and x.is_floating_point() else x
        return self.chosen[name].made(name, x)

    def _decoded(self, x: Tensor, leaf: Leaf) -> Tensor:
        if not self.step.encodings or self.options.view:
            return x
        return decode(self.step.encodings, x, leaf, self.step.call(self.state, training=False))

    def _seen(self, arrived: Named) -> Named:
        """Return parameters, or pieces of them, as the loss sees them in an evaluation."""
        step = self.step
        setting = step.settings(step.call(self.state, training=False), self.state.buffers, 1)[0]
        stations = step.microbatch(step.eval_loss, self.structure)
        with (
            chosen_kernels(step),
            stations.opened(arrived, (), setting, "values given to views", plain=True) as (seen, _),
        ):
            return dict(seen)

    def _begin(self, group: Group) -> Arriving:
        """Begin to gather what a group is made of, on the ranks that hold it."""
        if group.place != place_of(self.step):
            return Arriving()
        runs = self._runs([*group.kinds, *group.more])
        sizes = [(run.end - run.start) * run.dtype.itemsize for run in runs]
        flat = self._take(sum(-(-n // ALIGN) * ALIGN for n in sizes), self.masters.device)
        arriving, at = Arriving(), 0
        for run, num_bytes in zip(runs, sizes, strict=True):
            whole = flat[at : at + num_bytes].view(run.dtype)
            at += -(-num_bytes // ALIGN) * ALIGN
            self._send(run, whole, arriving)
            for leaf, start in run.leaves:
                arriving.weights[leaf.name] = whole[start : start + leaf.numel].view(leaf.shape)
        return arriving

    def _runs(self, names: Sequence[str]) -> list[Run]:
        """Return consecutive elements of buckets, or of parameters that are held whole, that have these parameters."""
        layout, at = self.structure.layout, self.structure.parts
        dtype: Callable[[str], torch.dtype] = lambda name: wire(self.step, self.structure, name, self.options)
        if layout is None or not self.structure.sharded:
            leaves = [self.structure.leaves[name] for name in dict.fromkeys(names)]
            return [Run(at[x.name], 0, x.numel, dtype(x.name), [(x, 0)]) for x in leaves]
        runs = list[Run]()
        for i, j in sorted(layout.places[name] for name in dict.fromkeys(names)):
            bucket, (leaf, start) = layout.buckets[i], (layout.buckets[i].leaves[j], layout.buckets[i].offsets[j])
            last = runs[-1] if runs and runs[-1].part == i else None
            if last is not None and 0 <= start - last.end < ALIGN:
                last.leaves.append((leaf, start - last.start))
                last.end = start + leaf.numel
            else:
                runs.append(Run(i, start, start + leaf.numel, dtype(leaf.name), [(leaf, 0)]))
            if len(runs[-1].leaves) == len(bucket.leaves):
                runs[-1].widen(bucket.numel)
        return runs

    def _send(self, run: Run, whole: Tensor, arriving: Arriving) -> None:
        """Begin to gather elements of a part into `whole` (n,): a bucket in one message, else ranks in turn."""
        shard = self.step.shard
        if not self.structure.sharded:
            whole.copy_(self._read(run.part, run.start, run.end))
            return
        assert shard is not None and self.structure.layout is not None
        axis, length = shard.legs["gather"], self.structure.layout.buckets[run.part].length
        if len(whole) == length * axis.size:
            part = self._read(run.part, 0, length)
            # of one dtype it is copied to its place while messages are under way: a tenth of the time of 268 MB
            alike = part.dtype == whole.dtype
            arriving.add(axis.start_all_gather(whole, part) if alike else LOSSLESS.gather(axis, part, whole))
            return
        for rank in range(axis.size):
            start, end = max(run.start, rank * length), min(run.end, (rank + 1) * length)
            if start < end:
                piece = whole[start - run.start : end - run.start]
                if rank == axis.index:
                    part = self._read(run.part, start - rank * length, end - rank * length)
                    arriving.add(axis.start_broadcast(part.to(piece.dtype), rank))
                    piece.copy_(part)
                else:
                    arriving.add(axis.start_broadcast(piece, rank))

    def _read(self, part: int, start: int, end: int) -> Tensor:
        """Return elements (n,) of what this rank holds of a part."""
        if part not in self.masters.elsewhere:
            return self.masters.parts[part].view(-1)[start:end]
        flat = [x.view(-1)[start:end] if i == part else x for i, x in enumerate(self.masters.parts)]
        return attrs.evolve(self.masters, parts=flat).read([part])()[0]

    def _take(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return memory (num_bytes,) uint8: of two buffers that no consumer has any more, or new."""
        free = next((b for b in self.buffers if b.base.numel() >= num_bytes and b.is_alone()), None)
        if free is None:
            self.buffers = [b for b in self.buffers if not b.is_alone() or b.base.numel() >= num_bytes][-1:]
            free = Scratch(torch.empty(num_bytes, dtype=torch.uint8, device=device))
            self.buffers.append(free)
        return free.base[:num_bytes]


@attrs.define(eq=False)
class Run:
    """Consecutive elements of a part of the parameters, and the parameters in it with where they begin."""

    part: int
    start: int
    end: int
    dtype: torch.dtype  # in which it is sent
    leaves: list[tuple[Leaf, int]]

    def widen(self, numel: int) -> None:
        """Make it all of a bucket."""
        self.leaves = [(leaf, self.start + at) for leaf, at in self.leaves]
        self.start, self.end = 0, numel


@attrs.define(eq=False)
class Arriving:
    """Weights, or pieces of them, whose memory messages under way write into."""

    weights: Named = tree.new(dict)
    works: deque[Work] = tree.new(deque)

    def add(self, work: Work) -> None:
        """Add a message that was begun, and wait for the first ones of many."""
        self.works.append(work)
        while len(self.works) > MOST_MESSAGES:
            self.works.popleft().wait()

    def wait(self) -> None:
        """Wait until all have arrived."""
        while self.works:
            self.works.popleft().wait()
