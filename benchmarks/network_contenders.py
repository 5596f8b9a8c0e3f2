"""Who trains in `benchmarks/network.py`: the GPT of `sharding_contenders`, sent in fewer bytes; what it sends."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

import fds
from benchmarks.harness import Call
from benchmarks.ranks import NUM_RANKS, Turns, take_turns
from benchmarks.sharding_contenders import AGAIN, BETAS, EPS, GPT, LR, WEIGHT_DECAY, Case, batches, ddp, loss_of
from fds import transports

COUNTED_STEPS = 2
Made = tuple[Call, Callable[[], int]]  # a step, and the bytes that `describe` says it sends


@attrs.frozen
class OverACable:
    """What the contenders of one cable did, by name."""

    turns: Turns
    wire_bytes: dict[str, float]  # that this rank's interface sent in a step, frames and acknowledgements included
    told_bytes: dict[str, int]  # that `describe` says


def sent(stage: int, **ways: Any) -> Callable[[Case], Made]:
    """Return fds's step at a stage, which sends by these transports."""

    def make(case: Case) -> Made:
        fds.init_distributed()
        apply, params, _ = fds.functional(GPT(case))
        step = fds.compose(
            fds.accumulate(case.accumulate),
            fds.shard_optimizer(fds.mesh(dp=NUM_RANKS)["dp"], stage=stage, **ways),
            fds.adamw(LR, BETAS, EPS, weight_decay=WEIGHT_DECAY),
            fds.donate(),
        )(lambda params, batch: loss_of(apply(params, batch[0]), batch[1]))
        state, turn = step.init(params), batches(case)
        del params

        def call() -> torch.Tensor:
            nonlocal state
            state, metrics = step(state, next(turn))
            return metrics["loss"]

        return call, lambda: sum(step.describe(state).sent.values())

    return make


def torch_ddp(case: Case) -> Made:
    """Return PyTorch's DDP, which sends 2 (W - 1) / W of the gradients' bytes."""
    return ddp(case), lambda: sum(4 * p.numel() for p in GPT(case).parameters()) * 2 * (NUM_RANKS - 1) // NUM_RANKS


EIGHT, FOUR = transports.quantized(8), transports.quantized(4)
CONTENDERS: dict[str, Callable[[Case], Made]] = {
    "DDP": torch_ddp,
    "fds 0": sent(0),
    "fds 0, 16 bits": sent(0, gradients=transports.cast(torch.bfloat16)),
    "fds 0, 8 bits": sent(0, gradients=EIGHT),
    "fds 0, 4 bits": sent(0, gradients=FOUR),
    "fds 0, 1 bit": sent(0, gradients=transports.onebit()),
    "fds 0, top 1%": sent(0, gradients=transports.topk(0.01)),
    "fds 3": sent(3),
    "fds 3, 8 bits": sent(3, weights=EIGHT, gradients=EIGHT),
    "fds 3, weights 8, gradients 4": sent(3, weights=EIGHT, gradients=FOUR),
}


def compete(case: Case, names: tuple[str, ...], rounds: int, first_calls: int, turn: int) -> OverACable:
    """Run on every rank: time these contenders in turns, and count what each sends; AGAIN at the end runs twice."""
    made = {name: CONTENDERS[name.removesuffix(AGAIN)](case) for name in names}
    calls = {name: call for name, (call, _) in made.items()}
    makers = {name: lambda call=call: call for name, call in calls.items()}
    turns = take_turns(makers, rounds=rounds, first_calls=first_calls, turn=turn)
    wire = {}
    for name, call in calls.items():
        dist.barrier()
        before = sent_by_the_interface()
        for _ in range(COUNTED_STEPS):
            call()
        dist.barrier()
        wire[name] = (sent_by_the_interface() - before) / COUNTED_STEPS
    return OverACable(turns, wire, {name: told() for name, (_, told) in made.items()})


def sent_by_the_interface() -> int:
    """Return the bytes that the interface of gloo has sent: at this rank's end of the cable, or over the loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith(f"{name}:"))
    return int(line.split(":")[1].split()[8])
