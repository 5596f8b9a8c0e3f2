"""What a step holds, sends and starts in messages on one rank, by formula: from the layout alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import attrs
import torch

from fds import tree
from fds.collectives import Axis
from fds.collectives.traffic import Expected, MessageKind
from fds.layout import Bucket
from fds.state import State
from fds.step.agreement import Agreement
from fds.step.all_stations import Stations
from fds.step.drafts import Drafts
from fds.step.residency.chunks import chunk_bytes, chunks_of, with_frozen
from fds.step.residency.contract import WHAT, deferred
from fds.step.residency.lives import elsewhere, groups
from fds.step.seeds import Seeds
from fds.step.sharding.order import Want
from fds.step.sharding.shard import Shard
from fds.step.sharding.transport import LOSSLESS, Leg
from fds.step.structure import Structure
from fds.step.totals import Totals, put_all


def held_bytes(step: Stations, structure: Structure, state: State) -> dict[str, int]:
    """Return part -> bytes that this rank holds: between steps the parts of the state, within one the others.

    `gradients` are their sums; `buckets` at stages 2 and 3 the two that are being filled and reduced, and where sums
    live elsewhere the one that is written (without microbatches, else all, at other stages too); `kept` what a
    transport keeps of them until the step is over; `whole` the gathered parameters, at stage 3 never more; `secondary`
    the slices of those that are gathered again inside a node; `viewed` what views make of one of those; `low` an
    unsharded step's 16-bit copy, and its copy of what lives elsewhere; `read` the slices that were read from there and
    are not sent, or cast, yet; `chunks` the copies of what a residency holds, of the chunk that is updated, the one
    before and the one after; `ahead` the new values of what is updated in backward, where the others are written over
    the old state.
    """
    num_bytes = {part: tree.num_bytes(getattr(state, part)) for part in ("params", "opt", "buffers", "slots")}
    lives = step.lives(structure, state)
    if lives.visited or lives.after:
        num_bytes["chunks"] = _chunks(step, structure, state)
    if step.place.donate and any(lives.apart):
        leaves = [*structure.pick(tree.leaves(state.params)), *tree.leaves(state.opt)]
        num_bytes["ahead"] = sum(x.nbytes for x, is_apart in zip(leaves, lives.apart, strict=False) if is_apart)
    num_bytes |= step.reduction.held_bytes([leaf for leaf in structure.leaves.values() if leaf.trained])
    gather, shard, layout = step.gather, step.shard, structure.layout
    away = elsewhere(step.place.residency, structure, lives.device)
    if away and (read := _read(step, structure, away)):
        num_bytes["read"] = read
    leave = any(lives.landed)
    if not structure.sharded:
        leaves = dict(zip(structure.names, tree.leaves(state.params), strict=True))
        seen = {name: gather.dtype_of(name, x.dtype) for name, x in leaves.items()}
        live = structure.trained_names
        sums = {n: leaves[n].numel() * (step.sum.dtype or seen[n]).itemsize for n in live}
        copied = {structure.part_names[i] for i in away} | {n for n, x in leaves.items() if x.dtype != seen[n]}
        low = sum(leaves[n].numel() * seen[n].itemsize for n in copied)
        num_bytes |= {"low": low} if low else {}
        if layout is None:
            num_bytes |= {"buckets": _landing(step, list(sums.values()), 3)} if leave else {}
            return {**num_bytes, "gradients": sum(sums.values())}
    assert layout is not None and shard is not None
    trained = [b for b in layout.buckets if b.trained]
    slices = [b.length * sum_dtype(step, b).itemsize for b in trained]
    if not shard.reduces_each_microbatch:
        whole = [b.numel * sum_dtype(step, b).itemsize for b in trained]
        num_bytes["gradients"] = sum(slices if leave and structure.sharded else whole)
        num_bytes |= {"buckets": _landing(step, whole, 4)} if leave else {}
    else:
        num_bytes["gradients"] = sum(slices)
        filled = [b.numel * (step.reduce.dtype or sum_dtype(step, b)).itemsize for b in trained]
        num_bytes["buckets"] = sum(sorted(filled)[-2:]) + leave * max(slices, default=0)
    if step.reduce.transport.keeps:
        num_bytes["kept"] = num_bytes.get("kept", 0) + sum(b.numel * 4 for b in trained)
    if structure.sharded:
        sizes = [_gathered(step, b) for b in layout.buckets]
        num_bytes["whole"] = sum(sizes)
        if shard.gathers_on_use:
            passing = gather.passing(layout, shard)
            passing_bytes = list(passing.values())
            bound = gather.room(layout, shard, passing) + shard.prefetch * max(passing_bytes, default=0)
            num_bytes["whole"] = sum(sizes) - sum(passing_bytes) + min(bound, sum(passing_bytes))
            if shard.secondary is not None:
                num_bytes["secondary"] = sum(passing_bytes) // shard.secondary.size
            if step.views and passing_bytes:
                num_bytes["viewed"] = _viewed(step, structure)
    return num_bytes


def _read(step: Stations, structure: Structure, away: frozenset[int]) -> int:
    """Return the most bytes of slices that were read and are not sent, or cast, yet: of one, or of two in a row."""
    gather, shard, layout = step.gather, step.shard, structure.layout
    if not structure.sharded:
        names = [structure.leaves[name] for name in structure.names]
        sizes = [leaf.numel * leaf.dtype.itemsize for leaf in names]
        return _in_a_row([sum(sizes[i] for i in group) for group in groups(away, sizes)])
    assert layout is not None and shard is not None
    slices = {i: b.length * b.dtype.itemsize for i, b in enumerate(layout.buckets) if i in away}
    passing = gather.passing(layout, shard) if shard.gathers_on_use else {}
    used = [
        size
        for i, size in slices.items()
        if i in passing and (shard.axis.size > 1 or seen_dtype(step, layout.buckets[i]) != layout.buckets[i].dtype)
    ]
    begun = min(2, max(1, shard.prefetch))
    return max(_in_a_row([n for i, n in slices.items() if i not in passing]), sum(sorted(used)[-begun:]))


def _in_a_row(sizes: list[int]) -> int:
    return max((sum(sizes[i : i + 2]) for i in range(len(sizes))), default=0)


def _landing(step: Stations, sums: list[int], most: int) -> int:
    """Return the bytes in memory of sums that land in the last microbatch, of one microbatch so many at once."""
    return sum(sums) if step.split.num_microbatches > 1 else sum(sorted(sums)[-most:])


def _chunks(step: Stations, structure: Structure, state: State) -> int:
    """Return the bytes of copies of three chunks: of the update, or of a slot that follows it if that is more."""
    opt = structure.align([state.opt[slot][name] for slot, want in structure.opt.items() for name in want.names])
    params, lives = structure.pick(tree.leaves(state.params)), step.lives(structure, state)
    sizes = [
        x.numel() * (step.sum.dtype or x.dtype).itemsize * (way == "read" or ahead)
        for x, way, ahead in zip(params, lives.gradients, lives.ahead, strict=True)
    ]
    for leaves, ways in zip([params, *opt.values()], lives.ways, strict=True):
        for i, (x, way) in enumerate(zip(leaves, ways, strict=True)):
            sizes[i] += x.nbytes if x is not None and way != "place" else 0
    lengths = [shape.numel() for shape in structure.shapes]
    chunks = chunks_of(step.place.residency, structure)
    sizes_ = [chunk_bytes(sizes, structure.pick(lengths), chunks)]
    for name, slot_lives in lives.after.items():
        both = [[x.nbytes for x in structure.like_parts(tree_)] for tree_ in (state.slots[name], state.params)]
        ways = zip(*both, *slot_lives.ways, slot_lives.gradients, strict=True)
        sizes = [x * (way != "place") + y * (read != "place") for x, y, way, read in ways]
        sizes_.append(chunk_bytes(sizes, lengths, with_frozen(structure, chunks)))
    return max(sizes_)


def sent_bytes(step: Stations, structure: Structure) -> dict[str, int]:
    """Return station -> bytes that this rank sends in one step, of `after` the mean; nothing without a layout.

    What an `optimizer` sends by itself it sends in calls in which nothing is sent in `reduce`, if not in all.

    Every bucket is gathered once a step at stages 1 and 2, at stage 3 at most twice a microbatch, unless the loss
    comes back to it after others or ranks take different paths; it is reduced once a step at stages 0 (which then
    gathers the sums) and 1, once a microbatch at 2 and 3, and at the end over the replicas. With a `secondary` axis all
    but the first gather of a bucket are of those ranks alone.
    """
    shard, layout = step.shard, structure.layout
    mean = {} if step.synchronize is None else {"after": round(step.synchronize.bytes_sent(structure)[1])}
    if layout is None or shard is None:
        return mean
    n, size = step.split.num_microbatches, shard.axis.size
    sent = {"gather": 0.0, "reduce": sum(_reduced(step, shard, b) for b in layout.buckets if b.trained)}
    if structure.sharded:
        passing = step.gather.passing(layout, shard) if shard.gathers_on_use else ()
        for i, bucket in enumerate(layout.buckets):
            once = step.gather.transport.bytes_sent("gather", bucket.numel, seen_dtype(step, bucket), size)
            again = once
            if shard.secondary is not None:
                dtype = seen_dtype(step, bucket)
                again = LOSSLESS.bytes_sent("gather", bucket.numel, dtype, shard.secondary.size)
            sent["gather"] += once + again * (2 * n - 1) * (i in passing)
    sent |= step.reduction.sent_bytes([leaf for leaf in structure.leaves.values() if leaf.trained], shard.data.size)
    return {station: round(n) for station, n in sent.items() if n} | mean


def _viewed(step: Stations, structure: Structure) -> int:
    """Return the bytes of the largest parameter as views show it; of one that they were not seen to show, its own."""
    leaves = structure.leaves.values()
    sizes = {leaf.name: leaf.numel * step.gather.dtype_of(leaf.name, leaf.dtype).itemsize for leaf in leaves}
    for shown in filter(None, step.runtime.viewed.values()):
        sizes[shown.path] = shown.meta.numel() * shown.meta.itemsize
    return max(sizes.values(), default=0)


def _reduced(step: Stations, shard: Shard, bucket: Bucket) -> float:
    """Return the bytes that this rank sends in a step to sum the gradients of a bucket."""
    summed, sent = sum_dtype(step, bucket), step.reduce.transport.of(bucket, shard.data).bytes_sent
    dtype = step.reduce.dtype or summed
    total = sent("reduce", bucket.numel, dtype, shard.axis.size)
    if shard.reduces_each_microbatch:
        total *= step.split.num_microbatches
    if not shard.slices_state:
        total += sent("spread", bucket.numel, dtype, shard.axis.size)
    if shard.replicate is not None:
        total += sent("combine", bucket.length, summed if shard.slices_state else dtype, shard.replicate.size)
    return total


def sum_dtype(step: Stations, bucket: Bucket) -> torch.dtype:
    """Return the dtype in which the gradients of a bucket are summed."""
    return step.sum.dtype or seen_dtype(step, bucket)


def seen_dtype(step: Stations, bucket: Bucket) -> torch.dtype:
    """Return the dtype in which the loss sees a bucket."""
    return step.gather.dtype_of_bucket(bucket, bucket.dtype)


def _gathered(step: Stations, bucket: Bucket) -> int:
    return bucket.numel * seen_dtype(step, bucket).itemsize


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
    messages: dict[MessageKind, PredictedMessages] = {}
    for message in _all(step, structure, state, step.everyone):
        if message.axis.size > 1 and message.count:
            old = messages.get(message.kind, PredictedMessages(message.kind, 0, 0))
            buckets = old.buckets if message.bucket is None else (*old.buckets, message.bucket)
            sums = old.count + message.count, old.bytes_sent + message.bytes_sent
            messages[message.kind] = PredictedMessages(message.kind, *sums, buckets, old.at_most or message.at_most)
    return tuple(messages.values())


def _all(step: Stations, structure: Structure, state: State, everyone: Axis) -> Iterator[Expected]:
    if step.shard is not None and step.reduction.sums_after(state.calls):
        yield from _of_buckets(step, structure, step.shard)
    yield from step.execute.messages(everyone, keeps=step.reduce.transport.keeps)
    yield from _of_shared(step, structure)
    yield from _of_agreement(step, structure, state, everyone)
    if step.synchronize is not None:
        yield from (attrs.evolve(message, at_most=True) for message in step.synchronize.messages(structure))
    if step.place.residency.kinds:  # at the end ranks hear whether all could read and write
        yield Expected.of(everyone, "all_gather", 1, torch.int64, what=WHAT)


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
            for message in transport.messages(name, axis, bucket.length, dtype):
                yield attrs.evolve(message, count=count * message.count, bucket=i, at_most=at_most)

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

    norm, puts = zero if normed else None, drafts.puts(deferred(step.place.residency, everyone), zero.device)
    if (group := dimensions.group) is not None:
        agreement, data, repeats = Agreement(group, 0), dimensions.data, dimensions.repeats
        put_all(agreement, totals, norm, state.buffers, data, puts, repeats=repeats)
        yield from agreement.messages()
    if (local := dimensions.local) is not None:  # which adds up what groups have added up
        agreement = Agreement(local, 0)
        put_all(agreement, attrs.evolve(totals, divisor=None), norm, state.buffers, local, puts)
        yield from agreement.messages()
    if drafts.late:
        agreement = Agreement(everyone, 0)
        drafts.put(agreement)
        yield from agreement.messages("notes")
