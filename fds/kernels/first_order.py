"""Autograd functions of kernels, and operators of their backward passes, which are of first order only.

Differentiating a backward pass raises an error instead of giving wrong numbers. It is raised only where autograd sees
an argument of the operator depend on the input. So an intermediate result that forward saves in place of the input is
not marked as non-differentiable.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from fds.errors import KernelError


class Function(torch.autograd.Function):
    """An autograd function, called with all arguments of `forward` by position.

    Torch makes a signature of `forward` at every call and binds the arguments to it, which took 13 of the 20 us of a
    call on a slow host. Here it finds a signature that is made once and has nothing to bind.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "forward" in vars(cls):
            parameters = inspect.signature(cls.forward).parameters.values()
            cls.forward.__signature__ = _Positional(list(parameters))


class _Positional(inspect.Signature):
    def bind(self, *args: Any, **kwargs: Any) -> Any:
        """Return the arguments as they are, where all are given by position."""
        is_complete = len(args) >= len(self.parameters) and not kwargs
        return _Bound(args) if is_complete else super().bind(*args, **kwargs)


class _Bound:
    __slots__ = ("args", "kwargs")

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args, self.kwargs = args, {}

    def apply_defaults(self) -> None:
        """Do nothing, since no argument is missing."""


class _FirstOrder(Function):
    @staticmethod
    def forward(op: Callable, *args: Any) -> Any:
        return op(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.operator = inputs[0].name  # not `name`: the context is a node of the graph, whose method that is

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise KernelError(
            "a kernel has no second derivative", where=ctx.operator, got="a gradient of its gradient",
            hint="references have one: with fds.kernels.only('reference'): ...",
        )


def first_order(op: Callable, *args: Any) -> Any:
    """Return `op(*args)` for the custom operator of a backward pass; differentiating it raises `KernelError`."""
    # torch.func and create_graph=True run backward in grad mode, where a raw operator takes no gradients
    return _FirstOrder.apply(op, *args) if torch.is_grad_enabled() else op(*args)
