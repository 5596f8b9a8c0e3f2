"""A step over a tensor axis beside the same step on one rank, for any module of a user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import tree

EPS = torch.finfo(torch.float64).eps * 2**14  # at most 2**10 products a gradient, over three calls and an evaluation


class Head(nn.Module):
    """A column whose pieces nothing joins."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 12)

    def forward(self, x: Any) -> Any:
        return self.head(x)


def squares(out: Any, targets: Any) -> Any:
    return F.mse_loss(out, targets)


def steps(
    make: Callable[[], Any],
    plan: Any,
    *parts: Any,
    size: int = 1,
    sequence: bool = False,
    overlap: int = 0,
    shape: tuple[int, ...] = (2, 6, 8),
    loss: Callable[..., Any] = squares,
    batch: Any = None,
) -> dict[str, Any]:
    """Return what a rank computes in three calls: losses, norms, an evaluation and whole parameters."""
    torch.manual_seed(0)
    module = make().double()
    if isinstance(module, nn.Sequential):
        value: Any = fds.Layers(module, loss)
        params = value.init(fds.random.key(0))
    else:
        apply, params, _ = fds.functional(module)
        value = lambda params, batch: loss(apply(params, batch[0]), batch[1])

    tp = fds.tensor_parallel(fds.mesh(tp=size)["tp"], plan, sequence=sequence, overlap=overlap)
    step = fds.compose(tp, *parts, fds.clip_by_global_norm(1e9), fds.sgd(0.1))(value)
    state, found = step.init(params, key=1), {}
    g = torch.Generator("cpu").manual_seed(5)
    x = torch.randn(*shape, generator=g, dtype=torch.float64, device="cpu")
    for call in range(3):
        state, found[f"call {call}"] = step(state, (x, x.tanh()) if batch is None else batch)
    found["evaluated"] = step.evaluate(state, (x, x.tanh()) if batch is None else batch)
    return tree.paths({**found, "params": step.params(state)})


def check(make: Callable[[], Any], plan: Any, *parts: Any, size: int = 2, **options: Any) -> None:
    """Assert that ranks compute what one does."""
    want = steps(make, plan, *parts, **options)
    for found in fds.simulate(lambda: steps(make, plan, *parts, size=size, **options), size):
        for name, x in want.items():
            assert torch.allclose(found[name], x, rtol=EPS, atol=EPS), (name, found[name], x)
