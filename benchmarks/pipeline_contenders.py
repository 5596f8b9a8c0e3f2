"""Who trains in `benchmarks/pipeline.py`: the layers, their data, and one maker for each contender.

All train the same layers from the same numbers, split at the same boundary, on the same microbatches, in float32, with
the same AdamW; none clips. No weights are tied: torch's pipelines know no ties. Every call returns the mean loss of the
step's microbatches on both ranks.
B rows, T tokens, V vocabulary, W width: `x_BTW` is a tensor of shape (B, T, W).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fds
from benchmarks.harness import Call
from benchmarks.ranks import NUM_RANKS, Resident, Turns, measure_resident, take_turns
from benchmarks.sharding_contenders import (
    AGAIN,
    BETAS,
    EPS,
    LR,
    NUM_BATCHES,
    VOCABULARY,
    WEIGHT_DECAY,
    Block,
    Case,
    adamw,
    loss_of,
)

Batch = tuple[Tensor, Tensor]  # inputs and targets of a step, all microbatches in one


class Embedding(nn.Module):
    """Tokens and learned positions. Like every layer here it seeds its own numbers: a rank builds only what it owns."""

    def __init__(self, case: Case, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, case.width), nn.Embedding(case.context, case.width)

    def forward(self, x_BT: Tensor) -> Tensor:
        return self.tokens(x_BT) + self.positions.weight


class Middle(Block):
    """A block."""

    def __init__(self, case: Case, seed: int):
        torch.manual_seed(seed)
        super().__init__(case.width)


class Head(nn.Module):
    """The last norm and the logits."""

    def __init__(self, case: Case, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.logits = nn.LayerNorm(case.width), nn.Linear(case.width, VOCABULARY, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        return self.logits(self.norm(x_BTW))


def layers(case: Case) -> list[tuple[type[nn.Module], Case, int]]:
    """Return the class and the arguments of every layer."""
    classes = [Embedding, *[Middle] * case.layers, Head]
    return [(cls, case, seed) for seed, cls in enumerate(classes)]


def boundaries(case: Case) -> list[int]:
    """Return where stages begin, and the end: equally many layers each, which DeepSpeed's 'uniform' gives too."""
    n = case.layers + 2
    return [n * stage // NUM_RANKS for stage in range(NUM_RANKS + 1)]


def batches(case: Case) -> Iterator[Batch]:
    """Yield the steps' batches for ever, the same on every rank; a target is a function of its input."""
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_BATCHES, case.accumulate * case.rows, case.context)
    inputs = torch.randint(VOCABULARY, shape, generator=generator)
    pairs = list(zip(inputs, (5 * inputs + 3) % VOCABULARY, strict=True))
    while True:
        yield from pairs


def torch_1f1b(case: Case) -> Call:
    """Return `torch.distributed.pipelining`'s 1F1B.

    The loss is divided before backward, which spares the pass over all gradients of `scale_grads`; outputs are not
    kept. The ranks that have no loss get it at the end, as those of the others do.
    """
    rank, ends = dist.get_rank(), boundaries(case)
    mine = nn.Sequential(*(cls(*args) for cls, *args in layers(case)[ends[rank] : ends[rank + 1]]))
    stage = PipelineStage(mine, rank, NUM_RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, case.accumulate, loss_fn=lambda out, targets: loss_of(out, targets) / case.accumulate, scale_grads=False
    )
    optimizer, turn = adamw(mine), batches(case)

    def call() -> Tensor:
        inputs, targets = next(turn)
        if stage.is_last:
            losses: list[Tensor] = []
            schedule.step(target=targets, losses=losses, return_outputs=False)
            loss = torch.stack(losses).detach().sum()
        else:
            schedule.step(inputs, return_outputs=False)
            loss = torch.zeros(())
        optimizer.step()
        optimizer.zero_grad()
        dist.broadcast(loss, src=NUM_RANKS - 1)
        return loss

    return call


def deepspeed_engine(case: Case) -> Call:
    """Return DeepSpeed's `PipelineEngine`, whose schedule is 1F1B."""
    import deepspeed  # here, so that whoever only runs others needs none
    from deepspeed.pipe import LayerSpec, PipelineModule

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")
    model = PipelineModule(
        [LayerSpec(*layer) for layer in layers(case)],
        num_stages=NUM_RANKS,
        loss_fn=loss_of,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    assert list(model.parts) == boundaries(case), f"DeepSpeed splits at {model.parts}"
    config = {
        "train_micro_batch_size_per_gpu": case.rows,
        "gradient_accumulation_steps": case.accumulate,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 0},
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
    turn = batches(case)
    return lambda: engine.train_batch(_microbatches(case, next(turn)))


def ours(schedule: fds.plans.PipelineSchedule, *, donated: bool = True) -> Callable[[Case], Call]:
    """Return fds's, by this schedule."""

    def make(case: Case) -> Call:
        fds.init_distributed()
        loss = fds.Layers([fds.LayerSpec(*layer) for layer in layers(case)], loss_of)
        step = fds.compose(
            fds.pipeline(
                schedule, fds.mesh(pp=NUM_RANKS)["pp"], num_microbatches=case.accumulate, partition=boundaries(case)
            ),
            fds.adamw(LR, BETAS, EPS, weight_decay=WEIGHT_DECAY),
            *([fds.donate()] if donated else []),
        )(loss)
        state, turn = step.init(loss.init, key=0), batches(case)

        def call() -> Tensor:
            nonlocal state
            state, metrics = step(state, next(turn))
            return metrics["loss"]

        return call

    return make


CONTENDERS: dict[str, Callable[[Case], Call]] = {
    "DeepSpeed": deepspeed_engine,
    "torch 1F1B": torch_1f1b,
    "fds 1F1B": ours(fds.plans.one_f_one_b),
    "fds ZB-H1": ours(fds.plans.zb_h1),
    "fds ZB-H2": ours(fds.plans.zb_h2),
    "fds GPipe": ours(fds.plans.gpipe),
    "fds 1F1B pure": ours(fds.plans.one_f_one_b, donated=False),
}


def compete(case: Case, names: tuple[str, ...], rounds: int, first_calls: int, turn: int) -> Turns:
    """Run on every rank: time these contenders in turns. A name that ends in AGAIN is made a second time."""
    make = {name: functools.partial(CONTENDERS[name.removesuffix(AGAIN)], case) for name in names}
    return take_turns(make, rounds=rounds, first_calls=first_calls, turn=turn)


def reside(case: Case, name: str, calls: int) -> Resident:
    """Run on every rank: measure the memory of this contender."""
    return measure_resident(functools.partial(CONTENDERS[name], case), calls=calls)


def _microbatches(case: Case, batch: Batch) -> Iterator[Batch]:
    return iter(list(zip(*(x.split(case.rows) for x in batch), strict=True)))
