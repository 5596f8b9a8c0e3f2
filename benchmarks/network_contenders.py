"""Who trains in `benchmarks/network.py`: the GPT of `sharding_contenders`, sent in fewer bytes; what it sends."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import torch
import torch.distributed as dist

import fds
from benchmarks.harness import Call
from benchmarks.ranks import Turns, take_turns
from benchmarks.sharding_contenders import AGAIN, BETAS, EPS, GPT, LR, WEIGHT_DECAY, Case, batches, ddp, loss_of
from fds import transports

COUNTED_STEPS = 2
TURN = 16  # steps from one agreement of local updates to the next
SETTINGS: dict[str, Any] = {"betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
SHARED = 2  # ranks of a node that has more than one


@attrs.frozen
class Made:
    """A contender.

    Attributes:
        call: makes `steps` steps.
        sent_bytes: returns the bytes that `describe` says a step sends; with two ranks in a node, what both send over
            the cable; None where that is not known.
    """

    call: Call
    sent_bytes: Callable[[], float | None]
    steps: int = 1


@attrs.frozen
class OverACable:
    """What the contenders of one cable did, by name."""

    turns: Turns  # seconds of a step
    wire_bytes: dict[str, float]  # that this rank's interface sent in a step, frames and acknowledgements included
    told_bytes: dict[str, float | None]  # that `describe` says


def composed(case: Case, *parts: Any, steps: int = 1, warm_up: int = 0, stations: Sequence[str] = ()) -> Made:
    """Return fds's step of these transforms, after some calls; `stations` are those that send, all if none is named."""
    apply, params, _ = fds.functional(GPT(case))
    step = fds.compose(fds.accumulate(case.accumulate), *parts, fds.donate())(
        lambda params, batch: loss_of(apply(params, batch[0]), batch[1])
    )
    state, turn = step.init(params), batches(case)
    del params

    def call() -> torch.Tensor:
        nonlocal state
        for _ in range(steps):
            state, metrics = step(state, next(turn))
        return metrics["loss"]

    def sent_bytes() -> float:
        sent = step.describe(state).sent
        return sum(sent[name] for name in stations or sent)

    for _ in range(warm_up):
        call()
    return Made(call, sent_bytes, steps)


def sent(stage: int, **ways: Any) -> Callable[[Case], Made]:
    """Return fds's step at a stage, which sends by these transports."""

    def make(case: Case) -> Made:
        fds.init_distributed()
        data = fds.mesh(dp=-1)["dp"]
        return composed(case, fds.shard_optimizer(data, stage=stage, **ways), fds.adamw(LR, **SETTINGS))

    return make


def onebit_adam(case: Case) -> Made:
    """Return fds's 1-bit Adam after its warm-up.

    A warm-up of one call leaves a variance that is no good one, so nothing is learned (lr=0): time is the same.
    """
    fds.init_distributed()
    data = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=0)
    return composed(case, data, fds.onebit_adam(0.0, 1, **SETTINGS), warm_up=2, stations=["optimizer"])


def zero_one_adam(case: Case) -> Made:
    """Return fds's 0/1 Adam where ranks agree once in `TURN` steps, in signs; nothing is learned, as in 1-bit Adam."""
    fds.init_distributed()
    data = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=0)
    adam = fds.zero_one_adam(0.0, 1, local_step_scaler=1, local_step_clipper=TURN, **SETTINGS)
    made = composed(case, data, adam, steps=TURN, warm_up=2, stations=["optimizer"])
    return attrs.evolve(made, sent_bytes=lambda: (made.sent_bytes() or 0) / TURN)


def local_updates(case: Case) -> Made:
    """Return steps of ranks that train apart and agree once in `TURN` of them, in 8 bits."""
    fds.init_distributed()
    apart = fds.local_updates(fds.mesh(replica=-1)["replica"], every=TURN, transport=EIGHT)
    return composed(case, apart, fds.adamw(LR, **SETTINGS), steps=TURN)


def nodes(**ways: Any) -> Callable[[Case], Made]:
    """Return fds's step at stage 0 on two ranks in each of two nodes, what both send over the cable beside it."""

    def make(case: Case) -> Made:
        fds.init_distributed()
        data = fds.mesh(node=-1, local=SHARED)["node", "local"]
        made = composed(case, fds.shard_optimizer(data, stage=0, **ways), fds.adamw(LR, **SETTINGS))
        return attrs.evolve(made, sent_bytes=lambda: between_nodes(made.call))

    return make


def between_nodes(call: Call) -> float | None:
    """Return the bytes that the ranks of a node send along the axis "node" in a call, None where there is none."""
    with fds.collectives.counted() as traffic:
        call()
    found = [count.bytes_sent for (_, axis), count in traffic.counts.items() if axis == "node"]
    return SHARED * sum(found) if found else None


def torch_ddp(case: Case) -> Made:
    """Return PyTorch's DDP, which sends 2 (W - 1) / W of the gradients' bytes."""
    size = dist.get_world_size()
    return Made(ddp(case), lambda: sum(4 * p.numel() for p in GPT(case).parameters()) * 2 * (size - 1) / size)


def deepspeed_onebit_adam(case: Case) -> Made:
    """Return DeepSpeed's own class of 1-bit Adam after its warm-up, without the engine around it.

    `tests/peers/onebit.py` has for it what torch no longer has, or a CPU has not.
    """
    from deepspeed.runtime.fp16.onebit.adam import OnebitAdam  # pyright: ignore[reportMissingImports]

    from tests.peers.onebit import running
    from tests.peers.worker import begin

    begin("deepspeed")
    model, turn = GPT(case), batches(case)
    engine = SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
    with running():
        optimizer = OnebitAdam(
            model.parameters(), engine, lr=0.0, freeze_step=1, comm_backend_name="compressed", **SETTINGS
        )

    def call() -> torch.Tensor:
        inputs, targets = next(turn)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        if engine.enable_backward_allreduce:
            for p in model.parameters():
                dist.all_reduce(p.grad)
        with running():
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    while engine.enable_backward_allreduce:
        call()
    call()
    return Made(call, lambda: None)


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
    "fds onebit_adam": onebit_adam,
    "fds zero_one_adam": zero_one_adam,
    "fds local_updates": local_updates,
    "DeepSpeed OnebitAdam": deepspeed_onebit_adam,
    "nodes, lossless": nodes(),
    "nodes, 8 bits": nodes(gradients=EIGHT),
    "nodes, 8 bits inside, 8 between": nodes(gradients=transports.hierarchical(EIGHT)),
    "nodes, 8 bits inside, 4 between": nodes(gradients=transports.hierarchical(EIGHT, FOUR)),
}


def compete(case: Case, names: tuple[str, ...], rounds: int, first_calls: int, turn: int) -> OverACable:
    """Run on every rank: time these contenders in turns, and count what each sends; AGAIN at the end runs twice."""
    made = {name: CONTENDERS[name.removesuffix(AGAIN)](case) for name in names}
    makers = {name: lambda call=one.call: call for name, one in made.items()}
    turns = take_turns(makers, rounds=rounds, first_calls=first_calls, turn=turn)
    seconds = {name: [x / made[name].steps for x in times] for name, times in turns.seconds.items()}
    wire = {}
    for name, one in made.items():
        dist.barrier()
        before, calls = sent_by_the_interface(), -(-COUNTED_STEPS // one.steps)
        for _ in range(calls):
            one.call()
        dist.barrier()
        wire[name] = (sent_by_the_interface() - before) / (calls * one.steps)
    told = {name: one.sent_bytes() for name, one in made.items()}
    return OverACable(attrs.evolve(turns, seconds=seconds), wire, told)


def sent_by_the_interface() -> int:
    """Return the bytes that the interface of gloo has sent: at this rank's end of the cable, or over the loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    line = next(x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith(f"{name}:"))
    return int(line.split(":")[1].split()[8])
