"""Who trains in `benchmarks/offload.py`: fds with leaves on the host, on a disk and in memory; DeepSpeed's offload."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

import fds
from benchmarks.harness import Call
from benchmarks.ranks import NUM_RANKS, Resident, Turns, measure_resident, take_turns
from benchmarks.sharding_contenders import (
    AGAIN,
    BETAS,
    EPS,
    GPT,
    LR,
    NUM_BATCHES,
    VOCABULARY,
    WEIGHT_DECAY,
    Case,
    batches,
    engine_loop,
    loss_of,
    ours,
)
from fds.step.residency.in_chunks import InChunks
from fds.step.update import Update

ROOM = "FDS_BENCHMARK_ROOM"  # in the environment: the folder for what lies on disk
LEAST = "forward, backward, messages"
LEAVES, LENGTH = 12, 2**22  # of the update that is timed alone: 50M parameters


def room() -> Path:
    """Return the folder for what lies on disk."""
    return Path(os.environ[ROOM])


@attrs.frozen
class Manner:
    """Where fds keeps what: `moments`, `masters` and `gradients` on "device", "host" or "disk".

    With `speculate` it updates in backward what it can.
    """

    moments: str = "device"
    masters: str = "device"
    gradients: str = "device"
    speculate: bool = False

    def transforms(self, folder: Path) -> list[Any]:
        """Return the transform, if any is needed."""
        if self == Manner():
            return []
        folder.mkdir(exist_ok=True)
        disk = fds.disk(folder)
        at = lambda word: disk if word == "disk" else word
        where = {"moments": at(self.moments), "masters": at(self.masters), "gradients": at(self.gradients)}
        return [fds.offload(**where, speculate=self.speculate)]


def sharded(stage: int, manner: Manner) -> Callable[[Case], Call]:
    """Return fds's on two ranks."""
    return ours(stage, lambda: manner.transforms(room() / f"fds-{stage}"))


def zero_offload(stage: int, device: str) -> Callable[[Case], Call]:
    """Return DeepSpeed's ZeRO with `offload_optimizer` on this device, its own fused AdamW for CPUs, and its defaults.

    Buckets are those of `benchmarks/sharding_contenders.py`; reads and writes of "nvme" are pipelined.
    """

    def make(case: Case) -> Call:
        import deepspeed  # here, so that whoever only runs others needs none

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        model = GPT(case)
        offload: dict[str, Any] = {"device": device}
        if device == "nvme":
            offload |= {"nvme_path": str(room() / "deepspeed"), "pipeline_read": True, "pipeline_write": True}
        settings: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 5_000_000, "offload_optimizer": offload}
        settings |= {"memory_efficient_linear": False} if stage == 3 else {"allgather_bucket_size": 5_000_000}
        config = {
            "train_micro_batch_size_per_gpu": case.rows,
            "gradient_accumulation_steps": case.accumulate,
            "gradient_clipping": 0.0,
            "zero_optimization": settings,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY},
            },
            "aio": {"block_size": 2**20, "queue_depth": 32, "overlap_events": True},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        return engine_loop(case, engine)

    return make


def least(case: Case) -> Call:
    """Return what every contender does: forward and backward in torch, one sum of gradients, one gather of parameters.

    Both are gloo's, of one flat tensor each; there is no update.
    """
    model, turn, axis = GPT(case), batches(case), fds.mesh(dp=NUM_RANKS)["dp"]
    whole = torch.zeros(sum(p.numel() for p in model.parameters()))
    own = whole.chunk(NUM_RANKS)[axis.index]

    def call() -> Tensor:
        inputs, targets = next(turn)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        model.zero_grad()
        axis.start_reduce_scatter(own, whole).wait()
        axis.start_all_gather(whole, own).wait()
        return loss.detach()

    return call


HOST, DISK = Manner("host", "host"), Manner("disk", "disk")
CONTENDERS: dict[str, Callable[[Case], Call]] = {
    **{f"fds {stage} host": sharded(stage, HOST) for stage in (1, 2, 3)},
    **{f"fds {stage} disk": sharded(stage, DISK) for stage in (1, 2, 3)},
    **{f"DeepSpeed {stage} cpu": zero_offload(stage, "cpu") for stage in (1, 2, 3)},
    "DeepSpeed 3 nvme": zero_offload(3, "nvme"),
    LEAST: least,
}


def compete(case: Case, names: tuple[str, ...], rounds: int, first_calls: int, turn: int) -> Turns:
    """Run on every rank: time these contenders in turns. A name that ends in AGAIN is made a second time."""
    make = {name: functools.partial(CONTENDERS[name.removesuffix(AGAIN)], case) for name in names}
    return take_turns(make, rounds=rounds, first_calls=first_calls, turn=turn)


def reside(case: Case, name: str, calls: int) -> Resident:
    """Run on every rank: measure the memory of this contender."""
    return measure_resident(functools.partial(CONTENDERS[name], case), calls=calls)


class Updates:
    """Steps whose update alone is timed, of 50M parameters whose gradients cost next to nothing."""

    def __init__(self, manner: Manner, folder: Path):
        params = {f"{i}": torch.zeros(LENGTH) for i in range(LEAVES)}
        loss = lambda params, batch: sum((x * batch).sum() for x in params.values())
        self.step = fds.compose(*manner.transforms(folder), fds.adamw(LR), fds.donate())(loss)
        self.state = self.step.init(params)
        self.moved = 2 * 4 * LENGTH * LEAVES  # bytes that an update reads, and as many that it writes

    def seconds(self) -> float:
        """Make a step; return how long its update took."""
        kind: Any = InChunks if self.step.place.residency.kinds else Update
        write, taken = kind.write, []

        def timed(*args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            write(*args, **kwargs)
            taken.append(time.perf_counter() - start)

        kind.write = timed
        try:
            self.state, _ = self.step(self.state, torch.ones(()))
        finally:
            kind.write = write
        return sum(taken)


class Steps:
    """Steps of one process on a GPT, without other ranks."""

    def __init__(self, case: Case, manner: Manner, folder: Path, *more: Any):
        with torch.device("meta"):  # the state is made parameter by parameter, and nothing else holds any
            apply, *_ = fds.functional(GPT(case))
        loss = lambda params, batch: loss_of(apply(params, batch[0]), batch[1])
        self.step = fds.compose(*manner.transforms(folder), *more, fds.adamw(LR), fds.donate())(loss)
        self.state, self.turn = self.step.init(fds.recipe(lambda: GPT(case))), _batches(case)

    def __call__(self) -> Tensor:
        """Make a step; return its loss."""
        self.state, metrics = self.step(self.state, next(self.turn))
        return metrics["loss"]


def _batches(case: Case) -> Iterator[tuple[Tensor, Tensor]]:
    shape = (NUM_BATCHES, case.rows, case.context)
    inputs = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))
    while True:
        yield from zip(inputs, (5 * inputs + 3) % VOCABULARY, strict=True)
