"""Operators of torch around what launches kernels, and the autograd functions that call them, of first order only.

`torch.compile` keeps operators whole, and tensor subclasses and dispatch modes see them as one call. The gradient is
that of the `Function` which calls them: an operator with `register_autograd` does not work under `torch.func`.

Not `torch.library.custom_op`: it passes through Python three times a call, which took 8 us of a slow host where this
takes 2.5.

Differentiating a backward pass raises an error instead of giving wrong numbers. It is raised only where autograd sees
an argument of the operator depend on the input. So an intermediate result that forward saves in place of the input is
not marked as non-differentiable.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fds.errors import KernelError

# private: torch has no public function that says whether dynamo would compile what is called here
_tracer: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback  # pyright: ignore

_library = torch.library.Library("fds", "FRAGMENT")


class Operator:
    """A functional operator: its results share no memory with its arguments, and it writes to none of them.

    Attributes:
        name: the operator is `torch.ops.fds.<name>`.
    """

    def __init__(self, name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
        self.name = name
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, _untraced(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"fds::{name}", fake, lib=_library)
        self._overload = getattr(torch.ops.fds, name).default

    def __call__(self, *args: Any) -> Any:
        """Return the results. Raises `KernelError` where autograd would need a gradient, which there is none."""
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            raise KernelError(
                "an operator has no gradient of its own", where=f"fds::{self.name}",
                got="an argument that requires grad",
                want="a call from a fds.kernels.operators.Function, or under torch.no_grad()",
            )
        return self._overload(*args)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, which is no code to trace: a frame above that cannot be compiled has dynamo look here.

    Where dynamo does not look, as it mostly does not, this takes 1.5 us less of a slow host than turning it off.
    """
    off = torch._disable_dynamo(function)
    return lambda *args: function(*args) if _tracer() is None else off(*args)


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Operator]:
    """Make an operator named `fds::<name>` of a function with annotated arguments, any number of them tensors.

    `fake` of the same arguments makes results without data, of the right shape, strides and dtype.
    """
    return lambda function: Operator(name, function, fake)


class Function(torch.autograd.Function):
    """An autograd function, called with all arguments of `forward` by position.

    Torch makes a signature of `forward` at every call and binds the arguments to it, which took 13 of the 20 us of a
    call on a slow host. Here it finds a signature that is made once and has nothing to bind.
    `forward` names its arguments: where no gradient is asked, torch.compile counts them, and gives `*args` a context.
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

    @staticmethod
    def vmap(info: Any, in_dims: tuple, op: Any, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        if not getattr(op, "has_rows", False):
            raise KernelError("a kernel's backward pass has no vmap", where=op.name, got="a gradient inside of vmap")
        results = tuple(_FirstOrder.apply(op, *as_rows(info.batch_size, in_dims[1:], args)))
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in results), (0,) * len(results)


def as_rows(count: int, dims: Sequence[int | None], args: Sequence[Any]) -> list[Any]:
    """Return arguments in which the dim of a vmap, or as many copies, is part of the first dim; no tensors as they are.

    An operator that computes each row of the first dim by itself is thus its own rule; it says so by `has_rows`.
    """

    def rows(x: Tensor, dim: int | None) -> Tensor:
        return (x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)

    return [rows(x, dim) if isinstance(x, Tensor) else x for x, dim in zip(args, dims, strict=True)]


def first_order(op: Callable, *args: Any) -> Any:
    """Return `op(*args)` for the custom operator of a backward pass; differentiating it raises `KernelError`."""
    # torch.func and create_graph=True run backward in grad mode, where a raw operator takes no gradients
    return _FirstOrder.apply(op, *args) if torch.is_grad_enabled() else op(*args)
