"""Collectives as functions that return new tensors; the gradient of each is the transposed collective.

They work under transforms of `torch.func`, which all ranks must apply alike, in `torch.utils.checkpoint`, and on tensor
subclasses. Backward passes communicate too, so all ranks must run them. On an axis of one rank they return their
argument. To overlap a collective with computation, use `Axis.start_*`.

Where ranks compute one loss together, as those of a tensor axis do, each with its pieces of some parameters, an
activation passes one of these between pieces of work that all do alike ("whole") and those of which each does a part;
each is the other one's transpose::

    copy_in   whole -> whole, for parts of a product:  forward x              backward all_reduce
    sum_out   terms -> their sum, whole:               forward all_reduce     backward the gradient
    cut       whole -> this rank's piece:              forward piece          backward all_gather
    join      pieces -> whole:                         forward all_gather     backward piece

Between pieces along the sequence and a product that each does a part of, `all_gather` and `reduce_scatter` stand in the
place of `copy_in` and `sum_out`.
Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (f and g); Korthikanti et al. 2022, arXiv:2205.05198.
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
    dim = _check_divided(x, axis, dim, "reduce_scatter")
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
    split_dim, concat_dim = _check_divided(x, axis, split_dim, "all_to_all"), _dim(x, concat_dim)
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


def copy_in(x: Tensor, axis: Axis) -> Tensor:
    """Return `x`, which every rank uses for a part of a product: its gradient is the sum of the ranks' gradients."""
    return x if axis.size == 1 else apply_function(_Copied, x, axis)


def sum_out(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of the ranks' terms, which all go on with alike: its gradient is each term's."""
    return x if axis.size == 1 else apply_function(_Summed, x, axis)


def cut(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's piece of what all have alike, one of `axis.size` equal ones along `dim`, a view.

    Raises `FdsError` where `dim` does not divide.
    """
    check_divides(x, axis, dim, "a dim cannot be cut into equal pieces")
    return x if axis.size == 1 else apply_function(_Cut, x, axis, dim % x.dim())


def join(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the ranks' pieces one after another along `dim`, with which all go on alike."""
    return x if axis.size == 1 else apply_function(_Joined, x, axis, dim % x.dim())


def largest(x: Tensor, axis: Axis) -> Tensor:
    """Return the largest of the ranks' tensors, element by element. Nothing has a gradient through it."""
    return x if axis.size == 1 else apply_function(_Largest, x, axis)


class Linear(torch.autograd.Function):
    """A function that is linear in its first argument; an axis, and dims or another number, follow.

    Of those between "whole" and "pieces", `takes` and `gives` say what the argument and the result are.
    """

    has_dims = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.axis, ctx.numbers = inputs[1], inputs[2:]


def _linear(name: str, forward: Callable[..., Tensor], transposed: Callable[..., Tensor], **more: Any) -> Any:
    """Return a function of a tensor, an axis and numbers, given its transpose, which is one of the same arguments."""

    # dynamo counts the parameters of `forward` to know whether it takes the context: no *numbers
    def backward(ctx: Any, g: Tensor) -> tuple:
        return transposed(g, ctx.axis, *ctx.numbers), *(None,) * (1 + len(ctx.numbers))

    return type(name, (Linear,), {"forward": staticmethod(forward), "backward": staticmethod(backward)} | more)


def _copy(x: Tensor, axis: Axis) -> Tensor:
    if torch.compiler.is_compiling():  # dynamo reads no layout
        return x.view_as(x)
    return x.view_as(x) if x.layout is torch.strided else x.detach()  # a sparse batch has no views


def _piece(x: Tensor, axis: Axis, dim: int) -> Tensor:
    n = x.shape[dim] // axis.size
    return x.narrow(dim, axis.index * n, n)


_WHOLE_TO_PIECES, _PIECES_TO_WHOLE = {"takes": "whole", "gives": "pieces"}, {"takes": "pieces", "gives": "whole"}
_AllGather = _linear("_AllGather", lambda x, axis, dim: operators.gather(x, axis.handle, dim), reduce_scatter)
_ReduceScatter = _linear("_ReduceScatter", lambda x, axis, dim: operators.scatter_sum(x, axis.handle, dim), all_gather)
_AllReduce = _linear("_AllReduce", lambda x, axis: operators.sum_all(x, axis.handle), all_reduce)
_AllToAll = _linear(
    "_AllToAll",
    lambda x, axis, split_dim, concat_dim: operators.transpose(x, axis.handle, split_dim, concat_dim),
    lambda g, axis, *dims: all_to_all(g, axis, *dims[::-1]),
)
_Broadcast = _linear(
    "_Broadcast",
    lambda x, axis, source: operators.copy_from(x, axis.handle, source),
    lambda g, axis, source: apply_function(_Reduce, g, axis, source),
    has_dims=False,
)
_Reduce = _linear("_Reduce", lambda x, axis, to: operators.sum_to(x, axis.handle, to), broadcast, has_dims=False)
_Copied = _linear("_Copied", _copy, sum_out, **_WHOLE_TO_PIECES)
_Summed = _linear("_Summed", lambda x, axis: operators.sum_all(x, axis.handle), copy_in, **_PIECES_TO_WHOLE)
_Cut = _linear("_Cut", _piece, join, **_WHOLE_TO_PIECES)
_Joined = _linear("_Joined", lambda x, axis, dim: operators.gather(x, axis.handle, dim), cut, **_PIECES_TO_WHOLE)


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, axis: Axis) -> Tensor:
        return operators.max_all(x, axis.handle)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        return None, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, axis: Axis, to: int) -> Tensor:
        return operators.send_to(x, axis.handle, to)

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
        return operators.recv_from(like, axis.handle, source)

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

    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return apply_function(function, tangent, ctx.axis, *ctx.numbers)

    def vmap(info: Any, in_dims: tuple, x: Tensor, axis: Axis, *numbers: int) -> tuple[Tensor, int]:
        numbers = tuple(n + function.has_dims for n in numbers)
        return apply_function(function, x.movedim(in_dims[0], 0), axis, *numbers), 0

    return type(function.__name__, (function,), {"jvp": staticmethod(jvp), "vmap": staticmethod(vmap)})


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


def _check_divided(x: Tensor, axis: Axis, dim: int, op: str) -> int:
    dim = _dim(x, dim)
    check_divides(x, axis, dim, f"{op} splits a dim into equal pieces")
    return dim


def check_divides(x: Tensor, axis: Axis, dim: int, what: str) -> None:
    """Raise `FdsError`, which says `what` is wrong, where the ranks do not divide a dim."""
    if x.shape[dim] % axis.size:
        raise FdsError(
            what,
            where=f"axis {axis.name!r}, {axis.size} ranks",
            got=f"dim {dim} of {tuple(x.shape)}",
            want=f"a multiple of {axis.size}",
        )
