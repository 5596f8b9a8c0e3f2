"""Linear layers over a tensor axis whose messages travel beside their products.

Each is what functions of `fds.collectives` and `torch.nn.functional.linear` compute one after another::

    copied_linear     linear(copy_in(x), w, b)
    linear_summed     sum_out(linear(x, w))
    gathered_linear   linear(all_gather(x, dim), w, b)
    linear_scattered  reduce_scatter(linear(x, w), dim)

While x, or its gradient, is gathered in pieces, the rows that are there are multiplied; while a sum of rows travels,
the next rows are. While the sum of dx travels, the gradients of weights are computed; where they need x whole, it is
gathered anew, beside the product that gives dx.

Weights are of this rank, (out, in) as `torch.nn.Linear` holds them. `chunks` cuts what travels along its rows.

Bits: with `chunks=1` no product is split, and all is as without overlap, to the bit, but that gradients of x through
several weights are added up inside the products. With more, products are of fewer rows, of which BLAS may add up the
terms in another order: results agree to rounding. What ranks have computed is summed in rank order over gloo and in
simulations, however it is cut. Gradients of weights and biases are of one product and one sum each at any `chunks`.
Under autocast all is cast before it travels, and gradients travel in 16 bits, too.

All ranks of the axis must run forward and backward alike. Backward is of first order: differentiating it raises
`FdsError`. In compiled code they break the graph.
Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198, section 4.2; Wang
et al. 2023, doi:10.1145/3567955.3567959 (products in pieces beside their messages).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.collectives import Axis
from fds.collectives.functional import check_divides
from fds.collectives.links import DONE
from fds.errors import FdsError, is_int
from fds.kernels import arguments
from fds.kernels.operators import Function
from fds.loss.compiled import untraced
from fds.nn.parallel import pieces

Biases = Sequence[Tensor | None]
_untraced = untraced("messages that travel beside products are not traced; those of fds.collectives are")


@_untraced
def copied_linear(x: Tensor, weights: Sequence[Tensor], biases: Biases, axis: Axis) -> tuple[Tensor, ...]:
    """Return linear(x, w, b) for every weight, where all ranks have the same `x` and parts of the weights.

    In backward the gradients of `x` are summed over the ranks beside the gradients of the weights.

    Args:
        x: (..., in), floating.
        weights: this rank's, (out, in) each.
        biases: (out,) or None for each weight.
        axis: the ranks.

    Raises `FdsError` for shapes and dtypes that do not fit.
    """
    x, weights, biases = _cast(x, weights, biases)
    if axis.size == 1:
        return _linears(x, weights, biases)
    return _Copied.apply(axis, 0, 1, x, *weights, *biases)  # pyright: ignore[reportReturnType]


@_untraced
def linear_summed(x: Tensor, weight: Tensor, axis: Axis, chunks: int) -> Tensor:
    """Return the sum over the ranks of linear(x, weight), with which all go on alike.

    Args:
        x: (..., in), this rank's.
        weight: (out, in), this rank's.
        axis: the ranks.
        chunks: into how many pieces the rows of the sum are cut, 1 or more.

    Raises `FdsError` for shapes and dtypes that do not fit.
    """
    x, (weight,), _ = _cast(x, [weight], [None])
    _check_chunks(chunks)
    if axis.size == 1:
        return F.linear(x, weight)
    return _Summed.apply(axis, 0, chunks, x, weight, None)[0]  # pyright: ignore


@_untraced
def gathered_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Biases, axis: Axis, *, dim: int, chunks: int
) -> tuple[Tensor, ...]:
    """Return linear(all_gather(x, dim), w, b) for every weight; x is saved for backward as the part that it is.

    Args:
        x: (..., in), this rank's part along `dim`, of the same shape on every rank.
        weights: this rank's, (out, in) each.
        biases: (out,) or None for each weight.
        axis: the ranks.
        dim: along which ranks hold parts, any but the last.
        chunks: into how many pieces the rows of a part are cut, 1 or more.

    Raises `FdsError` for shapes and dtypes that do not fit, and for another `dim`.
    """
    x, weights, biases = _cast(x, weights, biases)
    dim = _check_dim(x, dim)
    _check_chunks(chunks)
    if axis.size == 1:
        return _linears(x, weights, biases)
    return _Gathered.apply(axis, dim, chunks, x, *weights, *biases)  # pyright: ignore[reportReturnType]


@_untraced
def linear_scattered(x: Tensor, weight: Tensor, axis: Axis, *, dim: int, chunks: int) -> Tensor:
    """Return reduce_scatter(linear(x, weight), dim).

    Args:
        x: (..., in), this rank's.
        weight: (out, in), this rank's.
        axis: the ranks.
        dim: along which each gets an equal part of the sum, any but the last.
        chunks: into how many pieces the rows of a part are cut, 1 or more.

    Raises `FdsError` for shapes and dtypes that do not fit, for another `dim`, and where `dim` does not divide.
    """
    x, (weight,), _ = _cast(x, [weight], [None])
    dim = _check_dim(x, dim)
    _check_chunks(chunks)
    check_divides(x, axis, dim, "a dim cannot be cut into equal parts")
    if axis.size == 1:
        return F.linear(x, weight)
    return _Scattered.apply(axis, dim, chunks, x, weight, None)[0]  # pyright: ignore


class _Overlapped(Function):
    """A product, given its options, x, this rank's pieces of weights, and as many biases or None."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.options, x = inputs[:3], inputs[3]
        weights, _ = _halves(inputs[4:])
        is_x_needed = any(ctx.needs_input_grad[4:][: len(weights)])  # for a weight's gradient alone
        ctx.save_for_backward(x if is_x_needed else None, *weights)
        ctx.shape = x.shape


class _Call(NamedTuple):
    axis: Axis
    dim: int
    chunks: int
    shape: torch.Size  # of x
    wants: Sequence[bool]  # which gradients: of x, weights and biases


def _backward(gradients: Callable[..., tuple], ctx: Any, *dys: Any) -> tuple:
    compute = functools.partial(gradients, _Call._make((*ctx.options, ctx.shape, ctx.needs_input_grad[3:])))
    return None, None, None, *_once(compute, *ctx.saved_tensors, *dys)


def _of_copied(call: _Call, x: Tensor | None, *tensors: Tensor) -> tuple:
    weights, dys = _halves(tensors)
    dx, work = None, DONE
    if call.wants[0]:
        dx = dys[0].new_empty(call.shape)
        work = call.axis.start_all_reduce(pieces.sum_products(dys, [w.t() for w in weights], dx))
    gradients = _of_parameters(call.wants[1:], x, dys)
    work.wait()
    return dx, *gradients


def _of_summed(call: _Call, x: Tensor | None, *tensors: Tensor) -> tuple:
    weight, dy = tensors
    dx = torch.matmul(dy, weight) if call.wants[0] else None
    return dx, *_of_parameters(call.wants[1:], x, [dy])


def _of_gathered(call: _Call, x: Tensor | None, *tensors: Tensor) -> tuple:
    weights, dys = _halves(tensors)
    whole, gather = (None, DONE) if x is None else pieces.start_gather(pieces.rows_of_part(x, call.dim), call.axis)
    wait = None
    if call.wants[0]:
        by_ranks = [pieces.rows_of_whole(dy, call.dim, call.axis.size) for dy in dys]
        # One sum where gradients of weights hide it: they take as long as the products that pieces would hide behind.
        chunks = call.chunks if x is None else 1
        wait = pieces.start_scattered_products(by_ranks, [w.t() for w in weights], call.axis, chunks)
    gather.wait()
    gradients = _of_parameters(call.wants[1:], None if whole is None else whole.transpose(0, 1), dys)
    return None if wait is None else wait().view(call.shape), *gradients


def _of_scattered(call: _Call, x: Tensor | None, *tensors: Tensor) -> tuple:
    weight, dy = tensors
    weights = [weight.t()] if call.wants[0] else []  # without a product of its own, the gather is of one piece
    dxs, whole = pieces.gather_products(
        pieces.rows_of_part(dy, call.dim),
        weights,
        [None] * len(weights),
        call.axis,
        call.chunks if call.wants[0] else 1,
        keeps=call.wants[1],
    )
    dx = dxs[0].view(call.shape) if call.wants[0] else None
    return dx, *([None, None] if whole is None else _of_parameters(call.wants[1:], x, [whole]))


class _Copied(_Overlapped):
    takes, gives = "whole", "pieces"  # see `uses`

    @staticmethod
    def forward(axis: Axis, dim: int, chunks: int, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        return _linears(x, *_halves(parameters))

    backward = staticmethod(functools.partial(_backward, _of_copied))


class _Summed(_Overlapped):
    takes, gives = "pieces", "whole"

    @staticmethod
    def forward(axis: Axis, dim: int, chunks: int, x: Tensor, weight: Tensor, bias: None) -> tuple[Tensor]:
        if chunks == 1:
            y = F.linear(x, weight)
            axis.start_all_reduce(y).wait()
            return (y,)
        rows = x.reshape(-1, x.shape[-1])
        y = x.new_empty((*x.shape[:-1], len(weight)))
        under_way = []
        for at in pieces.cuts(len(rows), chunks):
            piece = pieces.sum_products([rows[at]], [weight], y.view(-1, len(weight))[at])
            under_way.append(axis.start_all_reduce(piece))
        for work in under_way:
            work.wait()
        return (y,)

    backward = staticmethod(functools.partial(_backward, _of_summed))


class _Gathered(_Overlapped):
    takes, gives = "pieces", "pieces"

    @staticmethod
    def forward(axis: Axis, dim: int, chunks: int, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        outs, _ = pieces.gather_products(pieces.rows_of_part(x, dim), *_halves(parameters), axis, chunks)
        shape = [*x.shape[:dim], x.shape[dim] * axis.size, *x.shape[dim + 1 : -1]]
        return tuple(y.view(*shape, y.shape[-1]) for y in outs)

    backward = staticmethod(functools.partial(_backward, _of_gathered))


class _Scattered(_Overlapped):
    takes, gives = "pieces", "pieces"

    @staticmethod
    def forward(axis: Axis, dim: int, chunks: int, x: Tensor, weight: Tensor, bias: None) -> tuple[Tensor]:
        by_ranks = pieces.rows_of_whole(x, dim, axis.size)
        y = pieces.start_scattered_products([by_ranks], [weight], axis, chunks)()
        return (y.view(*x.shape[:dim], x.shape[dim] // axis.size, *x.shape[dim + 1 : -1], len(weight)),)

    backward = staticmethod(functools.partial(_backward, _of_scattered))


class _Backward(Function):
    """What a backward pass computes; unlike it, called with tensors alone also under `torch.func`."""

    @staticmethod
    def forward(compute: Callable[..., tuple], *tensors: Any) -> tuple:
        return compute(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise FdsError(
            "a product beside its messages has no second derivative",
            got="a gradient of its gradient",
            hint="fds.collectives.all_gather, reduce_scatter and torch.nn.functional.linear have one",
        )


def _once(compute: Callable[..., tuple], *tensors: Any) -> tuple:
    """Return `compute(*tensors)`; differentiating it raises `FdsError`."""
    # torch.func and create_graph=True run backward in grad mode
    return _Backward.apply(compute, *tensors) if torch.is_grad_enabled() else compute(*tensors)  # pyright: ignore


def _halves(xs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    return xs[: len(xs) // 2], xs[len(xs) // 2 :]


def _linears(x: Tensor, weights: Sequence[Tensor], biases: Biases) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))


def _of_parameters(wants: Sequence[bool], x: Tensor | None, dys: Sequence[Any]) -> list[Tensor | None]:
    """Return the gradients of weights, then of biases, of which `wants` tells the same."""
    flat, n = [dy.reshape(-1, dy.shape[-1]) for dy in dys], len(dys)
    rows = None if x is None else x.reshape(-1, x.shape[-1])
    of_weights = [dy.t().mm(rows) if wanted else None for dy, wanted in zip(flat, wants[:n], strict=True)]
    return of_weights + [dy.sum(0) if wanted else None for dy, wanted in zip(flat, wants[n:], strict=False)]


def _cast(x: Tensor, weights: Sequence[Tensor], biases: Biases) -> tuple[Tensor, Sequence[Tensor], Biases]:
    """Return all as a product takes them, cast under autocast. Raises `FdsError` where they do not fit together."""
    n = len(weights)
    if n == 0 or len(biases) != n:
        raise FdsError(
            "not a bias, or None, for each of some weights", got=f"{n} weights, {len(biases)} biases", want="as many"
        )
    x, *parameters = arguments.as_products_cast(x, *weights, *biases)
    weights, biases = parameters[:n], parameters[n:]
    for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
        fits = w.dim() == 2 and x.dim() > 0 and w.shape[1] == x.shape[-1] and w.dtype == x.dtype
        if not fits or not x.is_floating_point() or (b is not None and (b.shape != w.shape[:1] or b.dtype != x.dtype)):
            bias = "" if b is None else f", bias {tuple(b.shape)} {b.dtype}"
            raise FdsError(
                "x, weight and bias do not fit together",
                where=f"weights[{i}]",
                got=f"x {tuple(x.shape)} {x.dtype}, weight {tuple(w.shape)} {w.dtype}{bias}",
                want="x (..., in), weight (out, in), bias (out,), of one floating-point dtype",
            )
    return x, weights, biases


def _check_chunks(chunks: int) -> None:
    if not is_int(chunks, 1):
        raise FdsError("not a number of pieces", where="chunks", got=repr(chunks), want="an int, 1 or more")


def _check_dim(x: Tensor, dim: int) -> int:
    if not is_int(dim, -x.dim()) or dim % x.dim() >= x.dim() - 1 or dim >= x.dim():
        raise FdsError(
            "no dim along which ranks can hold parts of the rows",
            got=f"dim {dim!r} of {tuple(x.shape)}",
            want=f"0 to {x.dim() - 2}, or from the end",
        )
    return dim % x.dim()
