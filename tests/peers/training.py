"""One small training of 20 steps that a JSON drives, by fds or by DeepSpeed: model, data, and what to compare.

Both run on ranks that are there already. A run is, step by step: the mean loss of the global batch, the learning rate
of the update, and the norm of the gradient before it is clipped, where it is known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fds
from fds.config import TrainingConfig

STEPS, RANKS, ROWS = 20, 2, 6  # ROWS of a microbatch on a rank
INPUTS, WIDTH, CLASSES, NUM_BATCHES = 23, 61, 11, 4  # odd: no parameter divides between two ranks


@attrs.frozen
class Run:
    """What a training gave, one number a step; a norm is None where the peer has none."""

    losses: list[float]
    lrs: list[float]
    norms: list[float | None]


class Model(nn.Module):
    """Two hidden layers and a norm: 6,050 parameters, the same first numbers always.

    They are bfloat16 numbers: DeepSpeed rounds a model to the dtype of the step before it makes master weights of it.
    """

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(7)
        self.first, self.norm = nn.Linear(INPUTS, WIDTH), nn.LayerNorm(WIDTH)
        self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        for layer in (self.first, self.second, self.head):
            for parameter in layer.parameters():
                bound = layer.in_features**-0.5
                drawn = torch.rand(parameter.shape, generator=draw) * 2 * bound - bound
                parameter.data = drawn.bfloat16().float()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.first(x)))
        return self.head(x + F.gelu(self.second(x)))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats, taken in float32."""
    return F.cross_entropy(logits.float(), targets)


def batches(rank: int, microbatches: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of a rank, all microbatches of a step in one; the target is a function of the input."""
    draw = torch.Generator().manual_seed(100 + rank)
    teacher = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(99))
    inputs = torch.randn(NUM_BATCHES, microbatches * ROWS, INPUTS, generator=draw)
    for step in range(STEPS):
        x = inputs[step % NUM_BATCHES]
        yield x, (x @ teacher).argmax(dim=1)


def by_fds(json: dict[str, Any]) -> Run:
    """Train on every rank that calls this, real or simulated."""
    mesh = fds.mesh(dp=RANKS)
    apply, params, _ = fds.functional(Model())
    loss = lambda params, batch: loss_of(apply(params, batch[0]), batch[1])
    step = fds.compose(*TrainingConfig.of(json).transforms(mesh))(loss)
    state, seen = step.init(params), []
    for batch in batches(mesh["dp"].index, json["gradient_accumulation_steps"]):
        state, metrics = step(state, batch)
        norm = float(metrics["grad_norm"]) if "grad_norm" in metrics else None
        seen.append((float(metrics["loss"]), float(metrics["lr"]), norm))
    return Run(*map(list, zip(*seen, strict=True)))


def by_deepspeed(json: dict[str, Any], *, empty_update: bool = True) -> Run:
    """Train on every rank that calls this, as DeepSpeed's users write it.

    At stage 0 in 16 bits it begins with an update by gradients of 0, to make the optimizer's state; Adam then counts
    its updates from 2, and decays parameters once more. `empty_update` false keeps it from that.
    """
    import deepspeed  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer as Unfused  # pyright: ignore[reportMissingImports]

    kept = contextlib.nullcontext() if empty_update else mock.patch.object(Unfused, "initialize_optimizer_states")
    with kept:
        model = Model()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=json)
    dtype, seen = next(model.parameters()).dtype, []
    for x, targets in batches(dist.get_rank(), json["gradient_accumulation_steps"]):
        losses, lr = updated(engine, lambda rows: engine(rows.to(dtype)), x.split(ROWS), targets.split(ROWS))
        norm = engine.get_global_grad_norm()
        seen.append((_mean(torch.stack(losses)), lr, None if norm is None else float(norm)))
    engine.destroy()
    return Run(*map(list, zip(*seen, strict=True)))


def updated(engine: Any, forward: Callable, inputs: Iterable, targets: Iterable) -> tuple[list[Tensor], float]:
    """Train DeepSpeed's engine on the microbatches of one update; return their losses, and the update's rate."""
    losses, lr = [], 0.0
    for rows, labels in zip(inputs, targets, strict=True):
        loss = loss_of(forward(rows), labels)
        engine.backward(loss)
        losses.append(loss.detach())
        (lr,) = engine.get_lr()
        engine.step()
    return losses, float(lr)


def _mean(losses: Tensor) -> float:
    total = losses.double().mean()
    dist.all_reduce(total)
    return float(total) / RANKS
