"""Collectives as functions that return new tensors; the gradient of each is the transposed collective.

They work under transforms of `torch.func`, which all ranks must apply alike, in `torch.utils.checkpoint`, and on tensor
subclasses. Backward passes communicate too, so all ranks must run them. On an axis of one rank they return their
argument. To overlap a collective with computation, use `Axis.start_*`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_unary

from fds.collectives import operators, worlds
from fds.collectives.axis import Axis
from fds.errors import FdsError, LossError

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
    return x if axis.size == 1 else apply_function(_AllGather, x, axis, _dim(x, dim))


@_dispatching
def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Sum the ranks' tensors and return this rank's piece, one of `axis.size` equal ones along `dim`.

    `(..., axis.size * N, ...)` becomes `(..., N, ...)`.

    The gradient is the all_gather of the ranks' gradients. Raises `FdsError` where `dim` does not divide.
    """
    dim = _divided(x, axis, dim, "reduce_scatter")
    return x if axis.size == 1 else apply_function(_ReduceScatter, x, axis, dim)


@_dispatching
def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum the ranks' tensors, all of one shape. The gradient is the sum of the ranks' gradients."""
    return x if axis.size == 1 else apply_function(_AllReduce, x, axis)


@_dispatching
def all_to_all(x: Tensor, axis: Axis, split_dim: int = 0, concat_dim: int = 0) -> Tensor:
    """Split `x` along `split_dim`, send piece i to rank i, and concatenate the pieces received along `concat_dim`.

    The gradient is the inverse, with the dims exchanged. Raises `FdsError` where `split_dim` does not divide.
    """
    split_dim, concat_dim = _divided(x, axis, split_dim, "all_to_all"), _dim(x, concat_dim)
    return x if axis.size == 1 else apply_function(_AllToAll, x, axis, split_dim, concat_dim)


@_dispatching
def broadcast(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Return the tensor of the rank with coordinate `source`; on other ranks `x` has only to match shape and dtype.

    The gradient on the source is the sum of the ranks' gradients, on other ranks zero.
    """
    return x if axis.size == 1 else apply_function(_Broadcast, x, axis, source)


@_dispatching
def send(x: Tensor, axis: Axis, to: int) -> Tensor:
    """Send `x` to the rank with coordinate `to`, and return a 0-d zero.

    Backward through that zero (add it to the loss) receives the gradient of `x` from `to`.
    """
    return apply_function(_Send, x, axis, to)


@_dispatching
def recv(like: Tensor, axis: Axis, source: int) -> Tensor:
    """Return the tensor that the rank with coordinate `source` sends, of the shape and dtype of `like`.

    If `like` requires a gradient, backward sends the gradient to `source`; that of `like` itself is zero.
    """
    return apply_function(_Recv, like, axis, source)


def barrier(axis: Axis) -> None:
    """Wait until all ranks of the axis have called this."""
    axis.barrier()


class Linear(torch.autograd.Function):
    """A function that is linear in its first argument; an axis, and dims or another number, follow."""

    has_dims = True


class _AllGather(Linear):
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


class _AllReduce(Linear):
    @staticmethod
    def forward(x: Tensor, axis: Axis) -> Tensor:
        return operators.all_reduce(x, axis.handle)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.axis = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return all_reduce(g, ctx.axis), None


class _AllToAll(Linear):
    @staticmethod
    def forward(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        return operators.all_to_all(x, axis.handle, split_dim, concat_dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.axis, ctx.split_dim, ctx.concat_dim = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return all_to_all(g, ctx.axis, ctx.concat_dim, ctx.split_dim), None, None, None


class _Broadcast(Linear):
    has_dims = False

    @staticmethod
    def forward(x: Tensor, axis: Axis, source: int) -> Tensor:
        return operators.broadcast(x, axis.handle, source)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.axis, ctx.peer = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return apply_function(_Reduce, g, ctx.axis, ctx.peer), None, None


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


def is_transformed() -> bool:
    """Say whether a transform of `torch.func`, or forward-mode AD, is at work."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0  # both private


def apply_function(function: Any, *args: Any) -> Any:
    """Apply an `autograd.Function`, with rules for `torch.func` where that is at work.

    Raises `LossError` there, by the name of the transform, for one that is not `Linear`, and for tangents on simulated
    ranks.
    """
    if not is_transformed():
        return function.apply(*args)
    if forward_ad._current_level >= 0 and worlds.simulated.get() is not None:
        raise LossError(
            "torch.func.jvp does not run on simulated ranks: torch counts its levels for all threads of a process",
            where=f"fds.simulate: {function.__name__.strip('_')}",
            want="ranks that are processes, or torch.func.grad, vjp, jacrev or vmap",
        )
    return _with_rules(function).apply(*args)


@functools.cache
def _with_rules(function: Any) -> Any:
    """Return a function of which tangents and batches are the function of them, if it is `Linear`.

    It is another class, since dynamo refuses one that has a rule for tangents.
    """
    if not issubclass(function, Linear):
        refuse = lambda transform: staticmethod(functools.partial(_refuse, function, transform))
        return type(function.__name__, (function,), {"jvp": refuse("jvp"), "vmap": refuse("vmap")})

    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        function.setup_context(ctx, inputs, output)
        ctx.options = inputs[1:]

    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return apply_function(function, tangent, *ctx.options)

    def vmap(info: Any, in_dims: tuple, x: Tensor, axis: Axis, *numbers: int) -> tuple[Tensor, int]:
        numbers = tuple(n + function.has_dims for n in numbers)
        return apply_function(function, x.movedim(in_dims[0], 0), axis, *numbers), 0

    rules = {"setup_context": setup_context, "jvp": jvp, "vmap": vmap}
    return type(function.__name__, (function,), {name: staticmethod(rule) for name, rule in rules.items()})


def _refuse(function: Any, transform: str, *_: Any) -> NoReturn:
    name = function.__name__.strip("_")
    raise LossError(
        f"torch.func.{transform} does not go through a function that sends messages",
        where=f"fds: {name}",
        got=f"{transform}, or what is made of it: " + ("jacrev, hessian" if transform == "vmap" else "jacfwd, hessian"),
        want="torch.func.grad, vjp or torch.autograd.grad; of a batch, a loop over its rows",
    )


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
