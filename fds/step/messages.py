"""The messages of a call, by formula: from the layout, and what earlier calls of the step have learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import attrs
import torch

from fds.collectives import Axis
from fds.collectives.traffic import Expected, MessageKind
from fds.state import State
from fds.step.agreement import Agreement
from fds.step.all_stations import Stations
from fds.step.drafts import Drafts
from fds.step.seeds import Seeds
from fds.step.sharding.footprint import seen_dtype, sum_dtype
from fds.step.sharding.order import Want
from fds.step.sharding.shard import Shard
from fds.step.sharding.transport import Leg
from fds.step.structure import Structure
from fds.step.totals import Totals, put_all


@attrs.frozen
class PredictedMessages:
    """The messages of one kind in a call.

    Attributes:
        kind: what they have in common.
        count: how many this rank starts.
        bytes_sent: by this rank in all of them; 0 for texts, whose length is not predicted.
        buckets: which flat buckets they carry, by number.
        at_most: whether there may be fewer: at stage 3 before the first call, which learns when buckets are gathered;
            of ranks that synchronize, in calls in which they do not.
    """

    kind: MessageKind
    count: int
    bytes_sent: int
    buckets: tuple[int, ...] = ()
    at_most: bool = False


def predicted(step: Stations, structure: Structure, state: State) -> tuple[PredictedMessages, ...]:
    """Return the messages that this rank starts in a call, by kind; nothing where no ranks share the step.

    Those of an optimizer, of gradient maps and of the loss itself are theirs to know, and so are those of a transport
    that is not the lossless one.
    """
    if step.everyone is None:
        return ()
    found: dict[MessageKind, PredictedMessages] = {}
    for one in _all(step, structure, state, step.everyone):
        if one.axis.size > 1 and one.count:
            old = found.get(one.kind, PredictedMessages(one.kind, 0, 0))
            buckets = old.buckets if one.bucket is None else (*old.buckets, one.bucket)
            sums = old.count + one.count, old.bytes_sent + one.bytes_sent
            found[one.kind] = PredictedMessages(one.kind, *sums, buckets, old.at_most or one.at_most)
    return tuple(found.values())


def _all(step: Stations, structure: Structure, state: State, everyone: Axis) -> Iterator[Expected]:
    phases = None if step.optimizer is None else step.optimizer.phases
    local = phases is not None and not state.calls.is_meta and phases.local(int(state.calls))
    if step.shard is not None and not local:
        yield from _of_buckets(step, structure, step.shard)
    yield from step.execute.messages(everyone, keeps=step.reduce.transport.keeps)
    yield from _of_shared(step, structure)
    yield from _of_agreement(step, structure, state, everyone)
    if step.synchronize is not None:
        yield from (attrs.evolve(one, at_most=True) for one in step.synchronize.messages(structure))
    kinds = step.place.residency.kinds  # who reads and writes elsewhere hears from all ranks whether they could
    times = 0 if not kinds else 2 + ("gradients" in kinds or step.place.speculate) + step.place.speculate
    yield Expected.of(everyone, "all_gather", 1, torch.int64, count=times, what="what lives elsewhere")


def _of_buckets(step: Stations, structure: Structure, shard: Shard) -> Iterator[Expected]:
    """Yield what gathers parameters and sums gradients."""
    layout, reduce, n = structure.layout, step.reduce, step.split.num_microbatches
    assert layout is not None
    learned = step.runtime.memories.get(("step", layout))
    plan = None if learned is None or learned.plan is None else Counter(learned.plan)
    passing = step.gather.passing(layout, shard) if shard.gathers_on_use else {}

    def leg(name: Leg, i: int, dtype: torch.dtype, count: int = 1, *, at_most: bool = False) -> Iterator[Expected]:
        bucket = layout.buckets[i]
        transport = step.gather.transport if name == "gather" else reduce.transport.of(bucket, shard.data)
        for axis in filter(None, [shard.legs.get(name)]):
            for one in transport.messages(name, axis, bucket.length, dtype):
                yield attrs.evolve(one, count=count * one.count, bucket=i, at_most=at_most)

    for i, bucket in enumerate(layout.buckets):
        if structure.sharded:
            on_use, dtype, second = i in passing, seen_dtype(step, bucket), shard.secondary
            times = 1 if not on_use else 2 * n if plan is None else plan["gather", i]
            at_most = on_use and plan is None
            first = times if second is None else min(times, 1)
            yield from leg("gather", i, dtype, first, at_most=at_most)
            if second is not None:  # from where it is gathered again
                again = Expected.of(second, "all_gather", bucket.numel // second.size, dtype, count=times - first)
                yield attrs.evolve(again, bucket=i, at_most=at_most)
        if not bucket.trained:
            continue
        summed = sum_dtype(step, bucket)
        sent = reduce.dtype or summed
        each = shard.reduces_each_microbatch
        yield from leg("reduce", i, sent, 1 if not each else n if plan is None else plan["reduce", i])
        if not shard.slices_state:
            yield from leg("spread", i, sent)
        yield from leg("combine", i, summed if shard.slices_state else sent)
    if shard.reduces_each_microbatch and not (learned and learned.final):  # in an order whose ends all come to
        ends = 1 if plan is None or learned is None else len(learned.ends)
        numel = len(attrs.fields(Want))
        yield Expected.of(shard.axis, "all_gather", numel, torch.int64, count=ends, what="step")


def _of_shared(step: Stations, structure: Structure) -> Iterator[Expected]:
    """Yield what sums the gradients of parameters that several ranks hold."""
    for part, segments in zip(structure.trained, structure.segments, strict=True):
        if segments and step.dimensions.differing:
            leaf = structure.leaves[segments[0].name]
            dtype = step.sum.dtype or step.gather.dtype_of(leaf.name, leaf.dtype)
            for _, placement in step.dimensions.differing:
                yield from placement.messages(leaf.name, structure.shapes[part].numel(), dtype)


def _of_agreement(step: Stations, structure: Structure, state: State, everyone: Axis) -> Iterator[Expected]:
    """Yield what ranks agree by: the loss, metrics, norms, buffers and notes, as numbers in float64."""
    dimensions, asked, drafts = step.dimensions, step.runtime.asked, Drafts.of(step.following, state, step.condition)
    trained = [structure.leaves[name] for name in structure.trained_names]
    kinds = [step.gather.dtype_of(leaf.name, leaf.dtype) for leaf in trained]
    others = [step.reduce.dtype, *(getattr(context, "dtype", None) for context in step.context)]
    seeds = Seeds.of(
        None if step.scale is None else torch.ones(()),
        step.split.num_microbatches,
        kinds,
        step.sum.dtype,
        others,
        data=dimensions.data,
        asked=asked,
        order=None,
    )
    divides = seeds.share is not None
    weights = divides and asked.get("weights") == ["Mean"]
    alone = step.execute.together or asked.get("weights") == ["Mean"]  # whether what a batch weighs is asked for alone
    if dimensions.data is not None and alone and (step.reduce.transport.keeps or step.place.speculate):
        yield Expected.of(dimensions.data, "all_reduce", 1, torch.float64, what="weights")
    if weights and dimensions.data is not None:
        yield Expected.of(dimensions.data, "all_reduce", 2, torch.float64, what="weights")

    if dimensions.shares_rows:
        yield Expected.of(everyone, "all_gather", 4, torch.int64, what="batch")
    normed = step.skips or weights or step.normed
    zero = torch.zeros((), device=state.step.device)
    metrics = {name: zero if name.endswith(": mean") else zero.long() for name in asked.get("step", ())}
    totals = Totals(zero, zero.double(), metrics, divisor=1 if divides else None)

    norm = zero if normed else None
    if (group := dimensions.group) is not None:
        agreement, data, repeats = Agreement(group, 0), dimensions.data, dimensions.repeats
        put_all(agreement, totals, norm, state.buffers, data, drafts.early, repeats=repeats)
        yield from agreement.messages()
    if (local := dimensions.local) is not None:  # which adds up what groups have added up
        agreement = Agreement(local, 0)
        put_all(agreement, attrs.evolve(totals, divisor=None), norm, state.buffers, local, drafts.early)
        yield from agreement.messages()
    if drafts.late:
        agreement = Agreement(everyone, 0)
        drafts.put(agreement)
        yield from agreement.messages("notes")
