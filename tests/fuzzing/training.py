"""One case trained by fds and by DeepSpeed, on ranks that are there already; and what is written down of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fds
from fds.config import TrainingConfig
from tests.fuzzing.cases import Case
from tests.peers.training import loss_of, updated

INPUTS, WIDTH, CLASSES = 5, 7, 3  # odd: no parameter divides between two ranks


@attrs.define
class Run:
    """What a training gave: a number for each step, None where it has none, and the parameters at its end.

    Scales have one number more: that of the step which would follow.
    """

    losses: list[float]
    lrs: list[float]
    norms: list[float | None]
    scales: list[float | None]
    skipped: list[bool]
    params: dict[str, list[float]]
    resumed: dict[str, list[float]] = attrs.field(factory=dict)  # the losses behind a save, by whose it was
    error: str = ""


class Model(nn.Module):
    """A hidden layer and a head, 73 parameters; the numbers are bfloat16's, for DeepSpeed rounds them to 16 bits."""

    def __init__(self, case: Case):
        super().__init__()
        self.first, self.head = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(1))
        if case.unused:
            self.unused = nn.Parameter(torch.ones(4))
        draw = torch.Generator().manual_seed(case.number)
        for parameter in self.parameters():
            parameter.data = (torch.rand(parameter.shape, generator=draw) - 0.5).bfloat16().float()
        if case.frozen:
            self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)) * self.scale)


def batches(case: Case, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of a rank, all microbatches of a step in one."""
    draw = torch.Generator().manual_seed(1000 * case.number + rank)
    for step in range(case.steps):
        x = torch.randn(case.microbatches * case.rows, INPUTS, generator=draw).bfloat16().float()
        y = torch.randint(CLASSES, (len(x),), generator=draw)
        yield (x * case.factor if step in case.loud else x), y


def by_fds(case: Case, saves: Path | None) -> Run:
    """Train on every simulated rank that calls this; `saves` is where both saved, if they did."""
    mesh = fds.mesh(dp=case.ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model = Model(case)
        apply, params, _ = fds.functional(model)
    frozen = [fds.freeze("first.bias")] if case.frozen else []
    config = TrainingConfig.of(case.json)
    step = fds.compose(*frozen, *config.transforms(mesh))(lambda p, b: loss_of(apply(p, b[0]), b[1]))
    seen, state = [], step.init(params)
    rest = list(batches(case, mesh["dp"].index))
    for number, batch in enumerate(rest, 1):
        state, metrics = step(state, batch)
        seen.append(tuple(_number(metrics, name) for name in ("loss", "lr", "grad_norm", "loss_scale", "skipped")))
        if saves is not None and number == case.saved:
            fds.save(saves / "fds", state, step)
    losses, lrs, norms, scales, skipped = map(list, zip(*seen, strict=True))
    scales.append(float(state.slots["loss_scale"].scale) if "loss_scale" in state.slots else scales[-1])
    whole = {name: x.double().flatten().tolist() for name, x in step.params(state).items()}
    run = Run(losses, lrs, norms, scales, [bool(one) for one in skipped], whole)
    if saves is not None:
        ways = {
            "fds": lambda: fds.load(saves / "fds", step, params)[0],
            "deepspeed": lambda: fds.import_deepspeed(saves / "deepspeed", step, params)[0],
        }
        run.resumed = {who: _behind(step, load(), rest[case.saved :]) for who, load in ways.items()}
    return run


def _behind(step: Any, state: Any, rest: list) -> list[float]:
    losses = []
    for batch in rest:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


def _number(metrics: dict[str, Tensor], name: str) -> float | None:
    return float(metrics[name]) if name in metrics else None


def by_deepspeed(case: Case, saves: Path | None, start: Callable) -> Run:
    """Train on every rank that calls this, as DeepSpeed's users write it; `start` makes the engine of a model."""
    from deepspeed.utils import safe_get_full_fp32_param  # pyright: ignore[reportMissingImports]

    model = Model(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = start(model, trained, case.json)
    dtype, seen = next(model.parameters()).dtype, []
    scaled = "fp16" in case.json
    for number, (x, targets) in enumerate(batches(case, dist.get_rank()), 1):
        before, scale = engine.skipped_steps, _scale(engine) if scaled else None
        forward = lambda rows: engine(rows.to(dtype))
        losses, lr = updated(engine, forward, x.split(case.rows), targets.split(case.rows))
        norm = engine.get_global_grad_norm()
        seen.append(
            (
                _mean(torch.stack(losses)),
                lr,
                None if norm is None else float(norm),
                scale,
                engine.skipped_steps > before,
            )
        )
        if saves is not None and number == case.saved:
            engine.save_checkpoint(str(saves / "deepspeed"))
    losses, lrs, norms, scales, skipped = map(list, zip(*seen, strict=True))
    scales.append(_scale(engine) if scaled else None)
    params, in_turn = {}, case.json["zero_optimization"].get("round_robin_gradients")
    for name, p in model.named_parameters():
        if p.requires_grad:
            whole = None if in_turn and not hasattr(p, "ds_id") else safe_get_full_fp32_param(p)  # parts of others
            params[name] = (p.detach() if whole is None else whole).double().flatten().tolist()
    engine.destroy()
    return Run(losses, lrs, norms, scales, skipped, params)


def _scale(engine: Any) -> float | None:
    return float(engine.optimizer.loss_scale)


def _mean(losses: Tensor) -> float:
    total = losses.double().mean()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
