"""Compositions of many kinds, on two ranks or four, whose messages are predicted and counted."""

from __future__ import annotations

import contextlib
import tempfile
from typing import Any

import torch
from torch import nn

import fds
from fds.optim import Optimizer
from fds.timing import MessageTable
from tests.laws.noting import noting

WIDTH, ROWS = 8, 12
Case = tuple[dict[str, int], Any, Any]  # axes of the mesh; mesh -> transforms; () -> a loss of layers


class Normed(nn.Sequential):
    """A layer with buffers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def mean(out, y):
    return (out - y).square().mean(), {"rows": torch.tensor(len(y)), "largest": out.detach().abs().max()}


def weighted(out, y):
    return fds.Mean((out - y).square().sum(), torch.tensor(float(len(y))))


def dense(depth=5, criterion=mean):
    return lambda: fds.Layers([fds.LayerSpec(nn.Linear, WIDTH, WIDTH)] * depth, criterion)


def normed():
    return fds.Layers([fds.LayerSpec(Normed)] * 3, mean)


def tied():
    first = fds.TiedLayerSpec("one", nn.Linear, WIDTH, WIDTH)
    return fds.Layers([first, fds.LayerSpec(nn.Linear, WIDTH, WIDTH), fds.LayerSpec(nn.Tanh), first], mean)


def sharded(stage, *others, loss=None, shape=None, **options) -> Case:
    """Data ranks at a stage, with buckets of a layer each."""
    sizes = {"dp": 2} if shape is None else shape

    def parts(mesh):
        more = {"replicate": mesh["copies"]} if "copies" in sizes else {}
        more |= {"secondary": mesh["local"]} if "local" in sizes else {}
        axis = mesh["dp", "local"] if "local" in sizes else mesh["dp"]
        first = [fds.tensor_parallel(mesh["tp"], CUT)] if "tp" in sizes else []
        first += [fds.local_updates(mesh["r"], every=2)] if "r" in sizes else []
        return [*first, fds.shard_optimizer(axis, stage=stage, **{"bucket_bytes": 300, **options, **more}), *others]

    return sizes, parts, loss or dense()


def piped(schedule, *others, loss=None, stage=None, shape=None, **options) -> Case:
    """Stages of layers, and data ranks at a stage of sharding."""

    def parts(mesh):
        data = [] if stage is None else [fds.shard_optimizer(mesh["dp"], stage=stage, bucket_bytes=300)]
        return [fds.pipeline(schedule, mesh["pp"], num_microbatches=4, **options), *data, *others]

    return shape or {"pp": 2}, parts, loss or dense()


def on_disk(**options):
    """Moments, masters and summed gradients on a disk."""
    disk = fds.disk(FOLDER.name, buffer_bytes=4096)
    return fds.offload(disk, masters=disk, gradients=disk, **options)


BF16, HALF = fds.precision(torch.bfloat16), fds.precision(torch.float16)
CLIP, SCALE, ACC = fds.clip_by_global_norm(1.0), fds.loss_scale(initial=2.0**8), fds.accumulate(3)
FOUR, GRID = {"copies": 2, "dp": 2}, {"pp": 2, "dp": 2}
FOLDER = tempfile.TemporaryDirectory(prefix="fds-messages-")
PLANS, QUANTIZED = fds.plans, fds.transports.quantized(8)

CASES: dict[str, Case] = {
    "stage 0": sharded(0),
    "stage 0, 16 bits, accumulated": sharded(0, BF16, ACC),
    "stage 0, buffers": sharded(0, CLIP, loss=normed),
    "stage 1": sharded(1, CLIP),
    "stage 1, loss scale": sharded(1, HALF, SCALE, ACC),
    "stage 1, frozen, average": sharded(1, fds.freeze("0.*"), fds.ema(0.9)),
    "stage 2": sharded(2),
    "stage 2, accumulated": sharded(2, ACC, CLIP, fds.skip_nonfinite()),
    "stage 2, weights of a Mean": sharded(2, HALF, SCALE, ACC, loss=dense(criterion=weighted)),
    "stage 2, moments on the host": sharded(2, ACC, fds.offload(moments="host")),
    "stage 2, gradients on the host": sharded(2, ACC, fds.offload(moments="host", gradients="host")),
    "stage 3": sharded(3),
    "stage 3, accumulated": sharded(3, ACC, BF16),
    "stage 3, checkpointed": sharded(3, fds.checkpoint_activations(), CLIP),
    "stage 3, no gather ahead": sharded(3, ACC, prefetch=0),
    "stage 3, room for all": sharded(3, ACC, max_live_bytes=2**20),
    "stage 3, small ones stay": sharded(3, persist_below=WIDTH + 1),
    "stage 3, weights of a Mean": sharded(3, HALF, SCALE, loss=dense(criterion=weighted)),
    "stage 1, two copies": sharded(1, CLIP, shape=FOUR),
    "stage 0, two copies": sharded(0, BF16, shape=FOUR),
    "stage 3, two copies": sharded(3, ACC, shape=FOUR),
    "stage 0, quantized": sharded(0, gradients=QUANTIZED),
    "stage 2, 1 bit, accumulated": sharded(2, ACC, gradients=fds.transports.onebit(), weights=QUANTIZED),
    "stage 1, quantized, two copies": sharded(1, gradients=QUANTIZED, weights=QUANTIZED, shape=FOUR),
    "stage 3, secondary": sharded(3, ACC, weights=QUANTIZED, shape={"dp": 2, "local": 2}),
    "1F1B": piped(PLANS.one_f_one_b),
    "GPipe, tied layers": piped(PLANS.gpipe, CLIP, loss=tied, partition=[0, 2, 4]),
    "1F1B, interleaved": piped(PLANS.interleaved(2), loss=dense(8)),
    "ZB-H1, loss scale": piped(PLANS.zb_h1, HALF, SCALE),
    "1F1B, buffers": piped(PLANS.one_f_one_b, loss=normed, partition=[0, 1, 3]),
    "1F1B, stage 1": piped(PLANS.one_f_one_b, CLIP, stage=1, shape=GRID),
    "1F1B, stage 2": piped(PLANS.one_f_one_b, stage=2, shape=GRID),
    "1F1B, stage 3, 16 bits": piped(PLANS.one_f_one_b, BF16, stage=3, shape=GRID),
    "stage 0, disk": sharded(0, on_disk()),
    "stage 1, disk, donated": sharded(1, on_disk(), CLIP, fds.donate()),
    "stage 1, disk, two copies": sharded(1, on_disk(), shape=FOUR),
    "stage 2, disk, early": sharded(2, on_disk(speculate=True), CLIP, ACC),
    "stage 1, disk, early, Mean": sharded(1, on_disk(speculate=True), loss=dense(criterion=weighted)),
    "stage 3, disk, average": sharded(3, on_disk(), fds.ema(0.9)),
    "1F1B, disk": piped(PLANS.one_f_one_b, on_disk()),
    "stage 2, top-k": sharded(2, gradients=fds.transports.topk(0.2)),
}
CUT = {"0": "column", "1": "row"}
# those of which a loss, an optimizer or what follows sends messages of its own: only small ones are predicted
OTHERS: dict[str, Case] = {
    "stage 2, Mean, scale, notes": sharded(
        2, ACC, fds.loss_scale(), noting(WIDTH), CLIP, loss=dense(criterion=weighted)
    ),
    "1-bit Adam": sharded(0, fds.onebit_adam(1e-3, freeze_step=2, eps=1e-2)),
    "local updates": ({"r": 2}, lambda mesh: [fds.local_updates(mesh["r"], every=2)], dense()),
    "local updates, stage 1": sharded(1, shape={"r": 2, "dp": 2}),
    "tensor": ({"tp": 2}, lambda mesh: [fds.tensor_parallel(mesh["tp"], CUT), CLIP], dense()),
    "tensor, stage 1, disk": sharded(1, on_disk(), shape={"dp": 2, "tp": 2}),
}


def run(name: str, calls: int = 2, every: int | None = 1) -> tuple[MessageTable, fds.State]:
    """Run a composition on this rank; return the table of `calls` calls after two, which learn, and the state."""
    shape, parts, loss = (CASES | OTHERS)[name]
    mesh, made = fds.mesh(**shape), loss()
    transforms = parts(mesh)
    optimizer = [] if isinstance(transforms[-1], Optimizer) else [fds.adamw(1e-3)]
    step = fds.compose(*transforms, *optimizer)(made)
    state = step.init(made.init, key=0)
    same = {"pp", "tp"} & shape.keys()
    place = mesh.rank if not same else mesh["dp"].index if {"tp", "dp"} <= shape.keys() else 0
    generator = torch.Generator().manual_seed(place)
    batch = tuple(torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    messages = fds.messages(every=every)
    for i in range(2 + calls):
        with messages(state) if i > 1 else contextlib.nullcontext():
            state, _ = step(state, batch)
    return messages.summary(step.describe(state)), state


def table_of(name: str) -> MessageTable:
    """Return the table alone, for ranks that are processes."""
    return run(name)[0]
