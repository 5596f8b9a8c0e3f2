"""Backward operators of first order only: differentiating one again raises an error instead of giving wrong numbers.

The error is raised only where autograd sees an argument of the operator depend on the input. So an intermediate result
that forward saves in place of the input is not marked as non-differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from fds.errors import KernelError


class _FirstOrder(torch.autograd.Function):
    @staticmethod
    def forward(op: Callable, *args: Any) -> Any:
        return op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]._name

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise KernelError(
            "a kernel has no second derivative", where=ctx.name, got="a gradient of its gradient",
            hint="references have one: with fds.kernels.only('reference'): ...",
        )


def first_order(op: Callable, *args: Any) -> Any:
    """Return `op(*args)` for the custom operator of a backward pass; differentiating it raises `KernelError`."""
    # torch.func and create_graph=True run backward in grad mode, where a raw operator takes no gradients
    return _FirstOrder.apply(op, *args) if torch.is_grad_enabled() else op(*args)
