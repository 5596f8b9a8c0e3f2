"""A job on FSDP2, as its users write it: two ranks, a model in shards, checkpoints by torch.distributed.checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ROWS, BEFORE, AFTER = 12, range(3), range(3, 6)
BETAS, EPS, DECAY = (0.8, 0.95), 1e-6, 0.1
FULL = StateDictOptions(full_state_dict=True)


class Net(nn.Module):
    """Odd sizes, so that shards are of different sizes."""

    def __init__(self, seed: int = 0, width: int = 37):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(6, width), nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def batch(call: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of all ranks."""
    g = torch.Generator().manual_seed(call)
    return torch.randn(ROWS, 6, generator=g), torch.randn(ROWS, 3, generator=g)


def groups(named: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Return two groups: what decays, and biases and norms."""
    params = list(named)
    return [
        {"params": [x for _, x in params if x.dim() > 1]},
        {"params": [x for _, x in params if x.dim() < 2], "weight_decay": 0.0, "lr": 0.03},
    ]


def job(seed: int, policy: MixedPrecisionPolicy) -> tuple[Any, torch.optim.Optimizer]:
    """Return the sharded model and its optimizer."""
    model = Net(seed)
    for layer in (model.first, model.norm, model.last):
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model, torch.optim.AdamW(groups(model.named_parameters()), lr=0.01, betas=BETAS, eps=EPS, weight_decay=DECAY)


def go_on(model: Any, optimizer: torch.optim.Optimizer, calls: Iterable[int]) -> list[float]:
    """Train, and return the losses of all rows."""
    losses = []
    for call in calls:
        x, y = (rows.chunk(dist.get_world_size())[dist.get_rank()] for rows in batch(call))
        loss = (model(x).float() - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def whole(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what the job has, whole, on every rank."""
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=FULL)}
    state["optim"] = get_optimizer_state_dict(model, optimizer, options=FULL)
    return copy.deepcopy(state)  # counts are the optimizer's own


def train(folder: Path, low: bool = False) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """Train, save in the ways that scripts do, go on; return what was saved, and the losses and the end after it."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    model, optimizer = job(0, policy)
    go_on(model, optimizer, BEFORE)
    named = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    counts = {"train": {"epoch": 2, "seen": torch.tensor(36)}}
    ways = {"named": {"app": named, **counts}, "flat": {**named["model"], "optimizer": flat}}
    if not low:
        ways["numbered"] = {"model": model.state_dict(), "optim": optimizer.state_dict()}
        ways["wrapped"] = {"model": {f"module._orig_mod.{n}": x for n, x in model.state_dict().items()}}
        ways["optimizer"] = {"optimizer": named["optim"]}
    for way, state in ways.items():
        dcp.save(state, checkpoint_id=folder / way)
    saved = whole(model, optimizer)
    return saved, go_on(model, optimizer, AFTER), whole(model, optimizer)


def load(folder: Path) -> tuple[dict[str, Any], list[float], dict[str, Any]]:
    """Load into another model and optimizer; return what they have then, and the losses and the end after it."""
    model, optimizer = job(1, MixedPrecisionPolicy())
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    return whole(model, optimizer), go_on(model, optimizer, AFTER), whole(model, optimizer)


def job_in_two_dims(kind: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Return a job on two by two ranks, which have copies of shards, or shards of a tensor axis's pieces."""
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")), Net(seed, width=40)
    if kind == "pieces":
        plan = {
            "first": ColwiseParallel(output_layouts=Replicate()),
            "last": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(model, mesh["inner"], plan)
    shards = mesh["outer"] if kind == "pieces" else mesh
    for layer in (model.first, model.norm, model.last, model):
        fully_shard(layer, mesh=shards)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train_in_two_dims(kind: str, folder: Path) -> dict[str, Any]:
    """Train and save, all ranks on the same rows; return what was saved."""
    model, optimizer = job_in_two_dims(kind, 0)
    for call in range(2):
        x, y = batch(call)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=folder)
    return whole(model, optimizer)


def load_in_two_dims(kind: str, folder: Path) -> dict[str, Any]:
    """Load into another job; return what it has then."""
    model, optimizer = job_in_two_dims(kind, 1)
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    return whole(model, optimizer)
