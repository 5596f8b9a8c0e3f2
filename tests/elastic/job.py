"""The job of the resizing tests: a tiny model in several compositions, which fit from 1 to 4 ranks, and its losses."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import plans

ROWS, BATCH = 48, 12  # 12 rows divide among 1, 2, 3 and 4 ranks
KEYS = torch.Generator().manual_seed(0)
DATA = [(torch.randn(6, generator=KEYS), torch.randn(2, generator=KEYS)) for _ in range(ROWS)]


def model() -> fds.Layers:
    """Return the loss, in float64: the losses of other numbers of ranks differ by additions of 2^-53."""
    specs = [nn.Linear, 6, 16], [nn.Tanh], [nn.Linear, 16, 8], [nn.Tanh], [nn.Linear, 8, 2]
    return fds.Layers([fds.LayerSpec(*spec, **kw(spec)) for spec in specs], F.mse_loss)


def kw(spec: list) -> dict[str, Any]:
    return {"dtype": torch.float64} if spec[0] is nn.Linear else {}


def double(rows: list) -> tuple:
    x, y = (torch.stack(columns).double() for columns in zip(*rows, strict=True))
    return x, y


def compose(kind: str, ranks: int) -> tuple[fds.Step, Any]:
    """Compose on a number of ranks: "dp0" to "dp3" are stages, "pp" and "tp" two ranks each where ranks are even."""
    pairs = 2 if ranks % 2 == 0 else 1
    if kind == "hybrid":
        mesh = fds.mesh(copies=pairs, dp=-1)
        axis, data = mesh["dp"], mesh["copies", "dp"]
        shard = fds.shard_optimizer(axis, stage=2, replicate=mesh["copies"] if pairs > 1 else None)
        transforms = [fds.accumulate(BATCH // data.size), shard]
    elif kind.startswith("dp"):
        data = fds.mesh(dp=-1)["dp"]
        transforms = [fds.accumulate(BATCH // data.size), fds.shard_optimizer(data, stage=int(kind[2]))]
    else:
        mesh = fds.mesh(**{kind[:2]: pairs, "dp": -1})
        data = mesh["dp"]
        shard = fds.shard_optimizer(data, stage=int(kind[2]))
        if kind.startswith("pp"):
            transforms = [fds.pipeline(plans.one_f_one_b, mesh["pp"], num_microbatches=BATCH // data.size), shard]
        else:
            cut = fds.tensor_parallel(mesh["tp"], {"0": "column", "2": "row"})
            transforms = [fds.accumulate(BATCH // data.size), cut, shard]
    lr = fds.schedules.warmup_cosine(1e-2, warmup_steps=10, total_steps=200)
    step = fds.compose(*transforms, fds.clip_by_global_norm(1.0), fds.adamw(lr))(model())
    return step, fds.DistributedLoader(DATA, BATCH, data, seed=1, collate=double)


KINDS = ("dp0", "dp1", "dp2", "dp3", "pp0", "pp1", "tp0", "tp2", "hybrid")


def train(directory: str, shelf: str, kind: str, calls: int, pause: float, save_every: int = 10, timeout=15.0) -> None:
    """Train as one of the ranks, and write a line for each call: who, where, how large the loss was."""
    torch.set_num_threads(1)
    log, who = Path(directory) / "log.jsonl", {"pid": os.getpid(), "shelf": Path(shelf).name}

    def write(**row: Any) -> None:
        with open(log, "a") as file:
            file.write(json.dumps(who | row) + "\n")

    def watch(state: fds.State, metrics: dict[str, Any]) -> None:
        row = {"calls": int(state.calls), "loss": float(metrics["loss"]), "lr": float(metrics["lr"])}
        write(**row, time=time.time(), rank=int(os.environ["RANK"]), world=int(os.environ["WORLD_SIZE"]))
        time.sleep(0.0 if (Path(directory) / "hurry").exists() else pause)

    write(start=True, time=time.time(), rank=int(os.environ.get("RANK", 0)))
    fds.elastic.run(
        directory,
        lambda ranks: compose(kind, ranks),
        model().init,
        calls=calls,
        key=3,
        save_every=save_every,
        watch=watch,
        timeout=timeout,
        shelf=shelf,
    )
    write(end=True)
