"""Collectives as functions that return new tensors; the gradient of each is the transposed collective.

They work under `torch.func.grad` and `vjp`, in `torch.utils.checkpoint`, and on tensor subclasses. Backward passes
communicate too, so all ranks must run them. On an axis of one rank they return their argument. To overlap a collective
with computation, use `Axis.start_*`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from fds.collectives import operators
from fds.collectives.axis import Axis
from fds.errors import FdsError

F = TypeVar("F", bound=Callable[..., Tensor])


def _dispatching(f: F) -> F:
    """Dispatch to `__torch_function__` of the first argument first, which an `autograd.Function` does not do."""

    @functools.wraps(f)
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if has_torch_function_unary(x):
            return handle_torch_function(run, (x,), x, *args, **kwargs)
        return f(x, *args, **kwargs)

    return cast(F, run)


@_dispatching
def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Concatenate the ranks' tensors, all of one shape, along `dim`; a 0-d tensor counts as `(1,)`.

    `(..., N, ...)` becomes `(..., axis.size * N, ...)`.

    The gradient is the reduce_scatter of the ranks' gradients.
    """
    x = x.reshape(1) if x.dim() == 0 else x
    return x if axis.size == 1 else _apply(_AllGather, x, axis, _dim(x, dim))


@_dispatching
def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Sum the ranks' tensors and return this rank's piece, one of `axis.size` equal ones along `dim`.

    `(..., axis.size * N, ...)` becomes `(..., N, ...)`.

    The gradient is the all_gather of the ranks' gradients. Raises `FdsError` where `dim` does not divide.
    """
    dim = _divided(x, axis, dim, "reduce_scatter")
    return x if axis.size == 1 else _apply(_ReduceScatter, x, axis, dim)


@_dispatching
def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum the ranks' tensors, all of one shape. The gradient is the sum of the ranks' gradients."""
    return x if axis.size == 1 else _apply(_AllReduce, x, axis)


@_dispatching
def all_to_all(x: Tensor, axis: Axis, split_dim: int = 0, concat_dim: int = 0) -> Tensor:
    """Split `x` along `split_dim`, send piece i to rank i, and concatenate the pieces received along `concat_dim`.

    The gradient is the inverse, with the dims exchanged. Raises `FdsError` where `split_dim` does not divide.
    """
    split_dim, concat_dim = _divided(x, axis, split_dim, "all_to_all"), _dim(x, concat_dim)
    return x if axis.size == 1 else _apply(_AllToAll, x, axis, split_dim, concat_dim)


@_dispatching
def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Return the tensor of the rank with coordinate `source`; on other ranks `x` has only to match shape and dtype.

    The gradient on the source is the sum of the ranks' gradients, on other ranks zero.
    """
    return x if axis.size == 1 else _apply(_Broadcast, x, axis, source)


@_dispatching
def send(x: Tensor, axis: Axis, to: int) -> Tensor:
    """Send `x` to the rank with coordinate `to`, and return a 0-d zero.

    Backward through that zero (add it to the loss) receives the gradient of `x` from `to`.
    """
    return _apply(_Send, x, axis, to)


@_dispatching
def recv(like: Tensor, axis: Axis, source: int) -> Tensor:
    """Return the tensor that the rank with coordinate `source` sends, of the shape and dtype of `like`.

    If `like` requires a gradient, backward sends the gradient to `source`; that of `like` itself is zero.
    """
    return _apply(_Recv, like, axis, source)


def barrier(axis: Axis) -> None:
    """Wait until all ranks of the axis have called this."""
    axis.barrier()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, axis: Axis, dim: int) -> Tensor:
        return operators.all_gather(x, axis.handle, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.axis, ctx.dim = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return reduce_scatter(g, ctx.axis, ctx.dim), None, None


class _ReduceScatter(_AllGather):
    @staticmethod
    def forward(x: Tensor, axis: Axis, dim: int) -> Tensor:
        return operators.reduce_scatter(x, axis.handle, dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return all_gather(g, ctx.axis, ctx.dim), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, axis: Axis) -> Tensor:
        return operators.all_reduce(x, axis.handle)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.axis = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return all_reduce(g, ctx.axis), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        return operators.all_to_all(x, axis.handle, split_dim, concat_dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.axis, ctx.split_dim, ctx.concat_dim = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return all_to_all(g, ctx.axis, ctx.concat_dim, ctx.split_dim), None, None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, axis: Axis, source: int) -> Tensor:
        return operators.broadcast(x, axis.handle, source)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.axis, ctx.peer = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return _apply(_Reduce, g, ctx.axis, ctx.peer), None, None


class _Reduce(_Broadcast):
    @staticmethod
    def forward(x: Tensor, axis: Axis, to: int) -> Tensor:
        return operators.reduce(x, axis.handle, to)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return broadcast(g, ctx.axis, ctx.peer), None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, axis: Axis, to: int) -> Tensor:
        return operators.send(x, axis.handle, to)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, ctx.axis, ctx.peer = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return recv(g.expand(ctx.shape), ctx.axis, ctx.peer), None, None


class _Recv(_Send):
    @staticmethod
    def forward(like: Tensor, axis: Axis, source: int) -> Tensor:
        return operators.recv(like, axis.handle, source)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return send(g, ctx.axis, ctx.peer).expand(ctx.shape), None, None


def _apply(function: Any, *args: Any) -> Tensor:
    return function.apply(*args)


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise FdsError("no such dim", got=f"dim {dim} of {tuple(x.shape)}", want=f"{-x.dim()} to {x.dim() - 1}")
    return dim % x.dim()


def _divided(x: Tensor, axis: Axis, dim: int, op: str) -> int:
    dim = _dim(x, dim)
    if x.shape[dim] % axis.size:
        raise FdsError(
            f"{op} splits a dim into equal pieces",
            where=f"axis {axis.name!r}, {axis.size} ranks",
            got=f"dim {dim} of {tuple(x.shape)}",
            want=f"a multiple of {axis.size}",
        )
    return dim
