"""A rank: train by DeepSpeed's own 1-bit optimizers on gradients from a seed, and write down what rank 0 ends with.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.peers.onebit OUT NAME STEPS '{"lr": ...}'

Where they call what torch no longer has, or a GPU's way to pack bits, this module has it for them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.peers.launch import torchrun
from tests.peers.worker import begin

SHAPES = {"w": (16, 12), "b": (64,), "v": (32, 5)}  # multiples of the padding on 2 and 4 ranks


def params() -> dict[str, Tensor]:
    """Return the parameters at the start."""
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) / 4 for name, shape in SHAPES.items()}


def gradients(t: int, rank: int) -> dict[str, Tensor]:
    """Return the gradients of a rank in a call: of ranks that pull into one direction, and apart."""
    draw = torch.Generator().manual_seed(1 + t)
    common = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    draw = torch.Generator().manual_seed(1_000_000 + 64 * t + rank)
    return {name: x + torch.randn(x.shape, generator=draw) / 2 for name, x in common.items()}


def train(name: str, steps: int, ranks: int, out: Any, **arguments: Any) -> dict[str, Tensor]:
    """Return the parameters after so many updates on new processes, `apart` by an optimizer each.

    Raises with what they printed.
    """
    torchrun("tests.peers.onebit", out, name, steps, json.dumps(arguments), ranks=ranks)
    return torch.load(out, weights_only=True)


class Bits:
    """Signs in bytes and back, in the place of an operator for GPUs."""

    def load(self) -> Bits:
        return self

    def packbits(self, x: Tensor, n: int, rank: int) -> Tensor:
        return torch.from_numpy(np.packbits(x.numpy() >= 0))

    def unpackbits(self, x: Tensor, n: int, rank: int) -> Tensor:
        return torch.from_numpy(np.unpackbits(x.numpy()).astype(np.float32)) * 2 - 1


class Agreed:
    """0/1 Adam without two of its defects: its first call counts, and going back to what was agreed on rounds.

    It goes back by subtracting the sum of what it added, so that ranks drift apart for good. Here what was agreed on is
    put back when the message of a parameter is sent, which is right after that.
    """

    def __init__(self, optimizer: Any, params: Any) -> None:
        self.optimizer, self.params = optimizer, list(params)
        self.values = [p.detach().clone() for p in self.params]
        handle = optimizer.comm_backend_handle
        self.send, handle.compressed_allreduce = handle.compressed_allreduce, self.sent

    def sent(self, x: Tensor, *rest: Any) -> Tensor:
        """Send what a parameter's momentum, or gradient, is; of a sum of updates, go back first."""
        for p, value in zip(self.params, self.values, strict=True):
            if self.optimizer.freeze_key and self.optimizer.state[p].get("momentum_accumulator") is x:
                p.data.copy_(value)
        return self.send(x, *rest)

    def after(self, t: int) -> None:
        """Note what was agreed on, and count from the first update on."""
        for p, value in zip(self.params, self.values, strict=True):
            state = self.optimizer.state[p]
            if t < 0:
                state["step"] = 0
            if not state["momentum_accumulator"].any():
                value.copy_(p.detach())


def older(function: Any) -> Any:
    """Return a method that takes its factor first too, as it did."""

    def call(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) > 1 and not isinstance(args[0], Tensor):
            factor, *tensors = args
            return function(self, *tensors, **({"alpha": factor} if len(tensors) == 1 else {"value": factor}))
        return function(self, *args, **kwargs)

    return call


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Let the classes of DeepSpeed run here."""
    from deepspeed import comm  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.comm import compressed  # pyright: ignore[reportMissingImports]

    gather = comm.all_gather
    with (
        mock.patch.object(compressed, "PackbitsBuilder", Bits),
        mock.patch.object(comm, "all_gather", lambda xs, x, group=None: gather(xs, x.view(-1), group=group)),
        mock.patch.object(Tensor, "add_", older(Tensor.add_)),
        mock.patch.object(Tensor, "addcmul_", older(Tensor.addcmul_)),
    ):
        yield


def clip_by_own_norm(params: list[Any], bound: float) -> None:
    """Clip what a rank has, as DeepSpeed's optimizer of 16-bit parameters does around the 1-bit ones."""
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.utils import get_flattened_grad_norm  # pyright: ignore[reportMissingImports]

    around = SimpleNamespace(clip_grad=bound, loss_scale_config=SimpleNamespace(cur_scale=1.0))
    FP16_Optimizer.unscale_and_clip_grads(around, [p.grad for p in params], get_flattened_grad_norm(params))


def main(out: str, name: str, steps: str, arguments: str) -> None:
    """Train."""
    torch.set_num_threads(1)
    begin("deepspeed")
    from deepspeed.runtime.fp16.onebit import adam, lamb, zoadam  # pyright: ignore[reportMissingImports]

    kinds = {"onebit_adam": adam.OnebitAdam, "zero_one_adam": zoadam.ZeroOneAdam, "onebit_lamb": lamb.OnebitLamb}
    engine = SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
    with running():
        held = {name: torch.nn.Parameter(x) for name, x in params().items()}
        given = {"comm_backend_name": "compressed", **json.loads(arguments)}
        apart, clip = given.pop("apart", False), given.pop("clip", 0.0)
        groups = [[p] for p in held.values()] if apart else [list(held.values())]
        optimizers = [kinds[name](params, engine, **given) for params in groups]
        agreed = Agreed(optimizers[0], held.values()) if name == "zero_one_adam" else None
        for t in range(-1, int(steps)):  # the first call updates nothing
            every = [gradients(max(t, 0), rank) for rank in range(dist.get_world_size())]
            for key, p in held.items():
                p.grad = every[dist.get_rank()][key]
                if engine.enable_backward_allreduce:  # in the order of ranks
                    p.grad = sum(one[key] for one in every) / len(every)
            clip_by_own_norm(list(held.values()), clip)
            for optimizer in optimizers:
                optimizer.step()
            if agreed is not None:
                agreed.after(t)
    if dist.get_rank() == 0:
        torch.save({key: p.detach() for key, p in held.items()}, out)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
