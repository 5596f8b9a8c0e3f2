"""What a step holds and sends on one rank, by formula: from the layout, without running anything."""

from __future__ import annotations

import torch

from fds import tree
from fds.layout import Bucket
from fds.optim.exchange import remembered
from fds.state import State
from fds.step.all_stations import Stations
from fds.step.residency.chunks import chunk_bytes, chunks_of, with_frozen
from fds.step.residency.masters import elsewhere, groups
from fds.step.sharding.shard import Shard
from fds.step.sharding.transport import LOSSLESS
from fds.step.structure import Structure


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
    held = {part: tree.num_bytes(getattr(state, part)) for part in ("params", "opt", "buffers", "slots")}
    lives = step.lives(structure, state)
    if lives.visited or lives.after:
        held["chunks"] = _chunks(step, structure, state)
    if step.place.donate and any(lives.apart):
        leaves = [*structure.pick(tree.leaves(state.params)), *tree.leaves(state.opt)]
        held["ahead"] = sum(x.nbytes for x, one in zip(leaves, lives.apart, strict=False) if one)
    if step.optimizer is not None and step.optimizer.phases is not None:
        own = [leaf for leaf in structure.leaves.values() if leaf.trained]
        held["kept"] = 4 * len(remembered(step.optimizer.phases)) * sum(leaf.numel for leaf in own)
        if step.optimizer.phases.apart:
            held["whole"] = sum(leaf.numel * leaf.dtype.itemsize for leaf in own)
    gather, shard, layout = step.gather, step.shard, structure.layout
    away = elsewhere(step.place.residency, structure, lives.device)
    if away and (read := _read(step, structure, away)):
        held["read"] = read
    leave = any(lives.landed)
    if not structure.sharded:
        leaves = dict(zip(structure.names, tree.leaves(state.params), strict=True))
        seen = {name: gather.dtype_of(name, x.dtype) for name, x in leaves.items()}
        live = structure.trained_names
        sums = {n: leaves[n].numel() * (step.sum.dtype or seen[n]).itemsize for n in live}
        copied = {structure.held[i] for i in away} | {n for n, x in leaves.items() if x.dtype != seen[n]}
        low = sum(leaves[n].numel() * seen[n].itemsize for n in copied)
        held |= {"low": low} if low else {}
        if layout is None:
            held |= {"buckets": _landing(step, list(sums.values()), 3)} if leave else {}
            return {**held, "gradients": sum(sums.values())}
    assert layout is not None and shard is not None
    trained = [b for b in layout.buckets if b.trained]
    slices = [b.length * sum_dtype(step, b).itemsize for b in trained]
    if not shard.reduces_each_microbatch:
        whole = [b.numel * sum_dtype(step, b).itemsize for b in trained]
        held["gradients"] = sum(slices if leave and structure.sharded else whole)
        held |= {"buckets": _landing(step, whole, 4)} if leave else {}
    else:
        held["gradients"] = sum(slices)
        filled = [b.numel * (step.reduce.dtype or sum_dtype(step, b)).itemsize for b in trained]
        held["buckets"] = sum(sorted(filled)[-2:]) + leave * max(slices, default=0)
    if step.reduce.transport.keeps:
        held["kept"] = held.get("kept", 0) + sum(b.numel * 4 for b in trained)
    if structure.sharded:
        sizes = [_gathered(step, b) for b in layout.buckets]
        held["whole"] = sum(sizes)
        if shard.gathers_on_use:
            passing = gather.passing(layout, shard)
            some = list(passing.values())
            bound = gather.room(layout, shard, passing) + shard.prefetch * max(some, default=0)
            held["whole"] = sum(sizes) - sum(some) + min(bound, sum(some))
            if shard.secondary is not None:
                held["secondary"] = sum(some) // shard.secondary.size
            if step.views and some:
                held["viewed"] = _viewed(step, structure)
    return held


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
    found = [chunk_bytes(sizes, structure.pick(lengths), chunks)]
    for name, one in lives.after.items():
        both = [[x.nbytes for x in structure.like_parts(some)] for some in (state.slots[name], state.params)]
        ways = zip(*both, *one.ways, one.gradients, strict=True)
        sizes = [x * (way != "place") + y * (read != "place") for x, y, way, read in ways]
        found.append(chunk_bytes(sizes, lengths, with_frozen(structure, chunks)))
    return max(found)


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
    if step.optimizer is not None and step.optimizer.phases is not None:
        lengths = [leaf.numel for leaf in structure.leaves.values() if leaf.trained]
        sent["optimizer"] = step.optimizer.phases.bytes_sent(lengths, shard.data.size)
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
