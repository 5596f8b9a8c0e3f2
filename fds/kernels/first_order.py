"""Gradients without a gradient: what a kernel's backward calls, so that a second derivative is refused, not wrong.

It is refused through the arguments of the operator: one of them must depend on the input for autograd. What a forward
pass made and keeps is therefore not marked as non-differentiable, where it is kept instead of the input.
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
        )  # fmt: skip


def first_order(op: Callable, *args: Any) -> Any:
    """Return `op(*args)`, for a custom operator of a backward pass; its own gradient raises `KernelError`."""
    # torch.func and create_graph=True run backward in grad mode, where a raw operator takes no gradients
    return _FirstOrder.apply(op, *args) if torch.is_grad_enabled() else op(*args)
