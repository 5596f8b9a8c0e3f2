"""Random configurations in float16, and the loss scale of each step by fds and by DeepSpeed.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.peers.float16 IN.json OUT.json

A run is, step by step: the loss scale, and whether the update was skipped. On the update on which DeepSpeed's scale
doubles it divides gradients by the doubled scale, and so makes half an update (fds does not); here its scale changes
after the update, since the parameters would else differ from there on, and with them what overflows.
"""

from __future__ import annotations

import json
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import fds
from fds.config import TrainingConfig
from tests.peers.launch import torchrun
from tests.peers.training import CLASSES, INPUTS, Model, loss_of

STEPS = 12
Run = list[tuple[float, bool]]


def configurations(seed: int, number: int) -> list[dict[str, Any]]:
    """Return random configurations: `json`, and `gain`, a factor of the inputs."""
    draw = random.Random(seed)
    return [{"json": _drawn(draw), "gain": draw.choice([1.0, 1.0, 3.0, 10.0])} for _ in range(number)]


def _drawn(draw: random.Random) -> dict[str, Any]:
    """Return a JSON of stages 1 to 3: at stage 0 DeepSpeed 0.19.6 does not scale the loss."""
    stage = draw.choice([1, 2, 3])
    fp16: dict[str, Any] = {"enabled": True}
    if draw.random() < 0.25:
        fp16["loss_scale"] = draw.choice([1024, 32768, 65536, 100000.0, 3000])
    else:
        fp16 |= {
            "initial_scale_power": draw.choice([12, 14, 16, 18, 20]),
            "hysteresis": draw.choice([1, 2, 3]),
            "loss_scale_window": draw.choice([1, 2, 3, 5, 1000]),
            "min_loss_scale": draw.choice([1, 1, 64]),
            "consecutive_hysteresis": draw.random() < 0.5,
        }
    adam = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}
    sgd = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
    return {
        "train_micro_batch_size_per_gpu": draw.choice([1, 4, 6]),
        "gradient_accumulation_steps": draw.randint(1, 8),
        "optimizer": draw.choice([adam, sgd]),
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {}),
        "fp16": fp16,
        "gradient_clipping": draw.choice([0.0, 1.0]),
    }


def batches(case: dict[str, Any], rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of a rank, all microbatches of a step in one."""
    draw = torch.Generator().manual_seed(100 + rank)
    teacher = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(99))
    rows = case["json"]["train_micro_batch_size_per_gpu"] * case["json"]["gradient_accumulation_steps"]
    for _ in range(STEPS):
        x = torch.randn(rows, INPUTS, generator=draw)
        yield x * case["gain"], (x @ teacher).argmax(1)


def by_fds(case: dict[str, Any]) -> Run:
    """Train on every rank that calls this."""
    mesh = fds.mesh(dp=-1)
    apply, params, _ = fds.functional(Model())
    loss = lambda params, batch: loss_of(apply(params, batch[0]), batch[1])
    step = fds.compose(*TrainingConfig.of(case["json"]).transforms(mesh))(loss)
    state, seen = step.init(params), []
    for batch in batches(case, mesh["dp"].index):
        state, metrics = step(state, batch)
        seen.append((float(metrics["loss_scale"]), bool(metrics["skipped"])))
    return seen


def by_deepspeed(case: dict[str, Any]) -> Run:
    """Train on every rank that calls this, the scale changing after each update."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    model, seen = Model(), []
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=case["json"])
    optimizer, overflows = engine.optimizer, []
    change, optimizer._update_scale = optimizer._update_scale, overflows.append
    for inputs, targets in batches(case, dist.get_rank()):
        scale, skipped = float(optimizer.loss_scale), engine.skipped_steps
        rows = case["json"]["train_micro_batch_size_per_gpu"]
        for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
            engine.backward(loss_of(engine(x.half()), y))
            engine.step()
        change(overflows.pop())
        seen.append((scale, engine.skipped_steps > skipped))
    engine.destroy()
    return seen


def train(cases: list[dict[str, Any]], ranks: int, folder: Path) -> list[Run]:
    """Return DeepSpeed's runs on new processes. Raises with what they printed."""
    given, out = folder / "cases.json", folder / "runs.json"
    given.write_text(json.dumps(cases))
    torchrun("tests.peers.float16", given, out, ranks=ranks)
    return [[(scale, skipped) for scale, skipped in run] for run in json.loads(out.read_text())]


def main(given: str, out: str) -> None:
    import deepspeed  # pyright: ignore[reportMissingImports]
    from deepspeed.accelerator import get_accelerator  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    device = type(get_accelerator())
    dtypes = [*get_accelerator().supported_dtypes(), torch.float16]
    # it refuses float16 on CPUs, which can do it; and gloo carries all, for its own operator waits by spinning
    with (
        mock.patch.object(device, "is_fp16_supported", return_value=True),
        mock.patch.object(device, "supported_dtypes", return_value=dtypes),
        mock.patch("deepspeed.comm.torch.build_shm_op", return_value=None),
    ):
        deepspeed.init_distributed(dist_backend="gloo")
        runs = [by_deepspeed(case) for case in json.loads(Path(given).read_text())]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(runs))
    dist.barrier()  # the first to leave would close the other's connections


if __name__ == "__main__":
    main(*sys.argv[1:])
