"""What a step holds and sends on one rank, by formula: from the layout, without running anything."""

from __future__ import annotations

import torch

from fds import tree
from fds.layout import Bucket
from fds.state import State
from fds.step.all_stations import Stations
from fds.step.residency import READ, chunk_bytes, chunks_of
from fds.step.sharding.shard import Shard
from fds.step.structure import Structure


def held_bytes(step: Stations, structure: Structure, state: State) -> dict[str, int]:
    """Return part -> bytes that this rank holds: between steps the parts of the state, within one the others.

    `gradients` are their sums; `buckets` at stages 2 and 3 the two that are being filled and reduced; `kept` what a
    transport keeps of them until the step is over; `whole` the gathered parameters, at stage 3 never more; `viewed`
    what views make of one of those; `low` an unsharded step's 16-bit copy; `chunks` the copies of what a residency
    holds, of the chunk that is updated, the one before and the one after.
    """
    held = {part: tree.num_bytes(getattr(state, part)) for part in ("params", "opt", "buffers", "slots")}
    if not READ.isdisjoint(step.place.residency.kinds):
        held["chunks"] = _chunks(step, structure, state)
    gather, shard, layout = step.gather, step.shard, structure.layout
    if not structure.sharded:
        leaves = dict(zip(structure.names, tree.leaves(state.params), strict=True))
        seen = {name: gather.dtype_of(name, x.dtype) for name, x in leaves.items()}
        live = structure.trained_names
        sums = {n: leaves[n].numel() * (step.sum.dtype or seen[n]).itemsize for n in live}
        low = sum(x.numel() * seen[n].itemsize for n, x in leaves.items() if x.dtype != seen[n])
        held |= {"low": low} if low else {}
        if layout is None:
            return {**held, "gradients": sum(sums.values())}
    assert layout is not None and shard is not None
    trained = [b for b in layout.buckets if b.trained]
    if not shard.reduces_each_microbatch:
        held["gradients"] = sum(b.numel * _sum_dtype(step, b).itemsize for b in trained)
    else:
        held["gradients"] = sum(b.length * _sum_dtype(step, b).itemsize for b in trained)
        filled = [b.numel * (step.reduce.dtype or _sum_dtype(step, b)).itemsize for b in trained]
        held["buckets"] = sum(sorted(filled)[-2:])
    if step.reduce.transport.keeps:
        held["kept"] = sum(b.numel * 4 for b in trained)
    if structure.sharded:
        sizes = [_gathered(step, b) for b in layout.buckets]
        held["whole"] = sum(sizes)
        if shard.gathers_on_use:
            some = list(gather.passing(layout, shard).values())
            bound = gather.room(layout, shard) + shard.prefetch * max(some, default=0)
            held["whole"] = sum(sizes) - sum(some) + min(bound, sum(some))
            if step.view and some:
                held["viewed"] = _viewed(step, structure)
    return held


def _chunks(step: Stations, structure: Structure, state: State) -> int:
    assert step.optimizer is not None
    opt = structure.align([state.opt[slot][name] for slot, want in structure.opt.items() for name in want.names])
    columns = [structure.pick(tree.leaves(state.params)), *opt.values()]
    return chunk_bytes(step.place.residency, columns, chunks_of(step.place.residency, structure, step.optimizer))


def sent_bytes(step: Stations, structure: Structure) -> dict[str, int]:
    """Return station -> bytes that this rank sends in one step; nothing without a layout.

    Every bucket is gathered once a step at stages 1 and 2, at stage 3 at most twice a microbatch, unless the loss
    comes back to it after others or ranks take different paths; it is reduced once a step at stages 0 (which then
    gathers the sums) and 1, once a microbatch at 2 and 3, and at the end over the replicas.
    """
    shard, layout = step.shard, structure.layout
    if layout is None or shard is None:
        return {}
    n, size = step.split.num_microbatches, shard.axis.size
    sent = {"gather": 0.0, "reduce": sum(_reduced(step, shard, b) for b in layout.buckets if b.trained)}
    if structure.sharded:
        passing = step.gather.passing(layout, shard) if shard.gathers_on_use else ()
        for i, bucket in enumerate(layout.buckets):
            once = step.gather.transport.bytes_sent("gather", bucket.numel, _seen_dtype(step, bucket), size)
            sent["gather"] += once * (2 * n if i in passing else 1)
    return {station: round(n) for station, n in sent.items() if n}


def _viewed(step: Stations, structure: Structure) -> int:
    """Return the bytes of the largest parameter as views show it; of one that they were not seen to show, its own."""
    leaves = structure.leaves.values()
    sizes = {leaf.name: leaf.numel * step.gather.dtype_of(leaf.name, leaf.dtype).itemsize for leaf in leaves}
    for shown in filter(None, step.runtime.viewed.values()):
        sizes[shown.path] = shown.meta.numel() * shown.meta.itemsize
    return max(sizes.values(), default=0)


def _reduced(step: Stations, shard: Shard, bucket: Bucket) -> float:
    """Return the bytes that this rank sends in a step to sum the gradients of a bucket."""
    summed, sent = _sum_dtype(step, bucket), step.reduce.transport.bytes_sent
    dtype = step.reduce.dtype or summed
    total = sent("reduce", bucket.numel, dtype, shard.axis.size)
    if shard.reduces_each_microbatch:
        total *= step.split.num_microbatches
    if not shard.slices_state:
        total += sent("spread", bucket.numel, dtype, shard.axis.size)
    if shard.replicate is not None:
        total += sent("combine", bucket.length, summed if shard.slices_state else dtype, shard.replicate.size)
    return total


def _sum_dtype(step: Stations, bucket: Bucket) -> torch.dtype:
    return step.sum.dtype or _seen_dtype(step, bucket)


def _seen_dtype(step: Stations, bucket: Bucket) -> torch.dtype:
    return step.gather.dtype_of(bucket.leaves[0].name, bucket.dtype)


def _gathered(step: Stations, bucket: Bucket) -> int:
    return bucket.numel * _seen_dtype(step, bucket).itemsize
