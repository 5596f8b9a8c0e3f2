"""Let ranks train apart for `every` steps, and then agree: an outer optimizer steps on how far they went (DiLoCo).

Fills:  topology, after          State:  opt: `anchor`, what was agreed on last, and `outer_*`, the outer optimizer's,
                                         alike on all ranks; `outer_kept` of a transport with error feedback
Law:    anchor <- outer(anchor, mean over ranks of anchor - params), params <- anchor; with every=1, outer=sgd(1) and an
        inner sgd, shard_optimizer at stage 0 to rounding
Cost:   2P / every sent a step; the bytes of the anchor (float32) and of the outer state; a copy of a fragment in a call
Source: Douillard et al. 2023 (DiLoCo), arXiv:2311.08105; Douillard et al. 2025 (streaming), arXiv:2501.18512
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from fds import optim, tree
from fds.collectives import Axis
from fds.collectives.traffic import Expected
from fds.errors import ComposeError, count, instance, is_int
from fds.layout import Segment
from fds.optim import Optimizer, returned
from fds.step import Call, Dimension, Step, Structure, Transport, fill, transform
from fds.step.call import seeded
from fds.step.placements import LocalCopies
from fds.step.residency.chunks import CUT, Piece, gaps_of
from fds.step.sharding.transport import LOSSLESS
from fds.step.stations import Slots

ANCHOR, OUTER, KEPT = "anchor", "outer_", "outer_kept"


@attrs.frozen(eq=False, repr=False)
class LocalUpdates:
    """In the station `after`: every `every` calls each fragment of the parameters is agreed on, in turn."""

    axis: Axis
    every: int
    outer: Optimizer
    transport: Transport
    fragments: int
    draws: ClassVar = False
    writes: ClassVar = "params"

    def init(self, segments: Sequence[Sequence[Segment]], *, params: list[Tensor]) -> Slots:
        """Return the anchor, the outer optimizer's slots, and what messages lost so far: nothing."""
        anchor = [p.float() if tree.is_low(p) else p.clone() for p in params]
        slots: Slots = {ANCHOR: [*anchor]}
        slots |= {OUTER + slot: parts for slot, parts in self.outer.init(segments, params=anchor).items()}
        if self.transport.keeps:
            slots[KEPT] = [torch.zeros_like(x, dtype=torch.float32) for x in anchor]
        return slots

    def owns(self, slot: str) -> bool:
        """Say by its name whether a slot is one of these."""
        return slot == ANCHOR or slot.startswith(OUTER)

    def agrees(self, slot: str) -> bool:
        """Say whether all ranks have a slot alike: what messages lost is each rank's own."""
        return self.owns(slot) and slot != KEPT

    def __call__(
        self, structure: Structure, params: list[Tensor], opt: Slots, *, skip: Tensor | None, call: Call
    ) -> None:
        """Let the fragment whose turn it is agree; where the step is skipped, it keeps its bits until its next turn."""
        for fragment in range(self.fragments):
            turn, rest = divmod(call.calls + 1 + fragment * self.every // self.fragments, self.every)
            if not rest:
                for pieces in self._messages(structure, fragment):
                    self._agree(pieces, params, opt, turn - 1, skip, call)

    def _agree(
        self, pieces: list[Piece], params: list[Tensor], opt: Slots, turn: int, skip: Tensor | None, call: Call
    ) -> None:
        """Step the anchor of some pieces by the mean of how far ranks went, and begin there anew."""

        def cut(slices: Sequence[Tensor | None]) -> list[Any]:
            return [None if (x := slices[piece.index]) is None else piece.cut(x) for piece in pieces]

        anchor, local = cut(opt[ANCHOR]), cut(params)
        went = torch.cat([a - p for a, p in zip(anchor, local, strict=True)])
        lost, kept = None, []
        if self.transport.keeps:  # of how far this rank went, not of its share of the mean: ranks may become more
            kept = cut(opt[KEPT])
            went += torch.cat(kept)
            lost = torch.zeros_like(went, dtype=torch.float32)
        went.div_(self.axis.size)
        way = self.transport.seeded(call.at("synchronize").key) if self.transport.draws else self.transport
        way.combine(self.axis, went, lost).wait()
        sizes = list(map(len, anchor))
        for message in (went,) if lost is None else (went, lost):  # a sign is sent of padding too, which stays 0
            for x, piece in zip(message.split_with_sizes(sizes), pieces, strict=True):
                for at, end in gaps_of(piece.segments, len(x)):
                    x[at:end].zero_()
        t = torch.full((), turn, dtype=torch.int64, device=call.device)
        with seeded(call, self.outer.schedules(), "synchronize"):
            now = self.outer.given(self.outer.values(t))
        agreed, slots = returned.update(
            self.outer,
            [*went.split_with_sizes(sizes)],
            {slot.removeprefix(OUTER): cut(x) for slot, x in opt.items() if self.agrees(slot) and slot != ANCHOR},
            anchor,
            segments=[piece.segments for piece in pieces],
            step=t,
            grad_scale=None,
            skip=skip,
            axes=call.dimensions.split,
            **now,
        )
        for slot, parts in slots.items():
            _write(cut(opt[OUTER + slot]), parts, None)
        _write(anchor, agreed, None)
        _write(local, agreed, skip)
        if lost is not None:
            _write(kept, lost.mul_(self.axis.size).split_with_sizes(sizes), skip)

    def _messages(self, structure: Structure, fragment: int) -> Iterator[list[Piece]]:
        """Yield the pieces of slices that travel together: a fragment's, of one dtype."""
        sizes = [structure.shapes[i].numel() for i in structure.trained]
        low, high = (sum(sizes) * i // self.fragments for i in (fragment, fragment + 1))
        by_dtype: dict[torch.dtype, list[Piece]] = {}
        start = 0
        for index, size in enumerate(sizes):
            first, last = (size if at >= start + size else max(at - start, 0) // CUT * CUT for at in (low, high))
            if first < last:
                dtype = structure.opt[ANCHOR].dtypes[index]
                by_dtype.setdefault(dtype, []).append(Piece.of(structure, index, first, last))
            start += size
        yield from by_dtype.values()

    def bytes_sent(self, structure: Structure) -> tuple[float, float]:
        """Return the most bytes that this rank sends in one call, and the mean over many calls."""
        size = self.axis.size
        each = [
            sum(self.transport.bytes_sent("combine", numel, dtype, size) for numel, dtype in self._kinds(structure, i))
            for i in range(self.fragments)
        ]
        return max(each), sum(each) / self.every

    def messages(self, structure: Structure) -> Iterator[Expected]:
        """Yield the messages of the last fragment's turn: none is larger by more than what cuts are rounded by."""
        for numel, dtype in self._kinds(structure, self.fragments - 1):
            yield from self.transport.messages("combine", self.axis, numel, dtype)

    def _kinds(self, structure: Structure, fragment: int) -> list[tuple[int, torch.dtype]]:
        """Return the elements and the dtype of every message of a fragment."""
        dtypes = structure.opt[ANCHOR].dtypes
        messages = self._messages(structure, fragment)
        return [(sum(x.end - x.start for x in pieces), dtypes[pieces[0].index]) for pieces in messages]

    def __repr__(self) -> str:
        parts = f", in {self.fragments} fragments" if self.fragments > 1 else ""
        ranks = f"{self.axis.name} ({self.axis.size} ranks)"
        return f"every {self.every} calls over {ranks}{parts}: {self.outer}, {self.transport}"


def _write(old: Sequence[Tensor | None], new: Sequence[Tensor | None], skip: Tensor | None) -> None:
    """Write new values into tensors that are not the same, unless `skip`, () bool, is true."""
    for x, y in zip(old, new, strict=True):
        if x is not None and y is not None and x is not y:
            x.copy_(y if skip is None else torch.where(skip, x, y.to(x.dtype)))


_OUTER = "fds.sgd(0.7, momentum=0.9, nesterov=True)"


@transform(
    axis=instance(Axis, ": {name} is not an axis", 'fds.mesh(replica=-1)["replica"]'),
    every=count(": {name} is a count of calls"),
    outer=instance(Optimizer, ": {name} is not an optimizer", _OUTER).or_none(),
    transport=instance(
        Transport, ": {name} is not a transport", "fds.transports.quantized(8), or another fds.step.Transport"
    ).or_none(),
)
def local_updates(
    axis: Axis, *, every: int, outer: Optimizer | None = None, transport: Transport | None = None, fragments: int = 1
):
    """Let every rank of `axis` take steps of its own, and agree with the others in one call of `every`.

    Each rank passes its own batch, and its gradients go into its own parameters. In every `every`-th call the outer
    optimizer steps from the parameters that were agreed on last, with the mean over ranks of (agreed - own) as its
    gradient, and all ranks go on from the result. Along another axis a step may still be shared (`shard_optimizer`,
    `pipeline`); there the ranks of one place on `axis` make one update together.

    Losses and metrics are means over all ranks in every call (`grad_norm` the root mean square of the ranks' norms),
    and module buffers are averaged. A clip goes by the rank's own norm. A step that one rank would skip all skip: it
    changes nothing, and the parameters that it would have agreed on wait for their next turn.

    `state.opt["anchor"]` is what was agreed on last, in float32 where parameters are narrower; between turns
    `step.params` returns those of this rank, and `step.evaluate` the mean loss over ranks that each use their own.

    Args:
        axis: of `fds.mesh`, over which parameters differ between turns. One of size 1 changes nothing.
        every: calls from one turn to the next, skipped ones included.
        outer: the outer optimizer, which treats every element by itself; None for `sgd(0.7, momentum=0.9,
            nesterov=True)`. Its schedules are of the turns so far.
        transport: how (agreed - own) / ranks travels, by its leg `combine`: `fds.transports.quantized(4)`, or None,
            without loss. What one with error feedback keeps is added to the next message.
        fragments: in so many parts the parameters agree, each in a call of its own: a call sends less at once. Parts
            are of equal size, in the order of the parameters.

    Raises `ComposeError` for anything else, `MeshError` for an axis of ranks that do not run now.
    """
    outer = optim.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    axis.check_current()
    if outer.elementwise is not True or outer.draws:
        raise ComposeError(
            "local_updates: an outer optimizer treats every element by itself, and draws nothing",
            got=repr(outer)[:80],
            want=f"{_OUTER}, or adamw",
        )
    if not is_int(fragments, 1) or fragments > every:
        raise ComposeError(
            "local_updates: each fragment agrees in a call of its own",
            got=f"fragments={fragments!r:.40}, every={every}",
            want="an int from 1 to every",
        )
    channel = axis.channel("local_updates")
    way = LOSSLESS if transport is None else transport.on(channel)
    filler = LocalUpdates(channel, every, outer, way, fragments)

    def apply(step: Step) -> Step:
        if axis.size == 1:
            return step
        return fill(step, topology=Dimension(channel, "local", LocalCopies(channel)), after=filler)

    return apply
