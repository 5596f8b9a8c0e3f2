"""Linear layers over a tensor axis whose messages travel beside their products.

Each is what `fds.collectives` or `mappings` and `torch.nn.functional.linear` compute one after another::

    copied_linear     linear(copied(x), w, b)
    linear_summed     summed(linear(x, w))
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
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.collectives import Axis
from fds.collectives.links import DONE
from fds.errors import FdsError, is_int
from fds.kernels import arguments
from fds.kernels.operators import Function
from fds.loss.compiled import untraced
from fds.nn.parallel import pieces

Biases = Sequence[Tensor | None]
_untraced = untraced("messages that travel beside products are not traced; fds.nn.parallel.mappings' are")


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
    return _Copied.apply(axis, x, *weights, *biases)  # pyright: ignore[reportReturnType]


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
    return _Summed.apply(axis, chunks, x, weight)  # pyright: ignore[reportReturnType]


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
    if x.shape[dim] % axis.size:
        raise FdsError(
            "a dim cannot be cut into equal parts",
            where=f"axis {axis.name!r}, {axis.size} ranks",
            got=f"dim {dim} of {tuple(x.shape)}",
            want=f"a multiple of {axis.size}",
        )
    if axis.size == 1:
        return F.linear(x, weight)
    return _Scattered.apply(axis, dim, chunks, x, weight)  # pyright: ignore[reportReturnType]


class _Copied(Function):
    takes, gives = "whole", "pieces"  # see `uses`; weights are pieces

    @staticmethod
    def forward(axis: Axis, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        n = len(parameters) // 2
        return _linears(x, parameters[:n], parameters[n:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        _save(ctx, 1, inputs)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        x, *weights = ctx.saved_tensors
        compute = functools.partial(_backward_of_copied, *ctx.options, ctx.needs_input_grad[1:])
        return None, *_once(compute, x, *weights, *dys)


def _backward_of_copied(axis: Axis, wants: Sequence[bool], x: Tensor | None, *tensors: Tensor) -> tuple:
    n = len(tensors) // 2
    weights, dys = tensors[:n], tensors[n:]
    dx, work = None, DONE
    if wants[0]:
        dx = dys[0].new_empty((*dys[0].shape[:-1], weights[0].shape[1]))
        work = axis.start_all_reduce(pieces.sum_products(dys, [w.t() for w in weights], dx))
    gradients = _of_parameters(wants[1:], x, dys)
    work.wait()
    return dx, *gradients


class _Summed(Function):
    takes, gives = "pieces", "whole"

    @staticmethod
    def forward(axis: Axis, chunks: int, x: Tensor, weight: Tensor) -> Tensor:
        if chunks == 1:
            y = F.linear(x, weight)
            axis.start_all_reduce(y).wait()
            return y
        rows = x.reshape(-1, x.shape[-1])
        y = x.new_empty((*x.shape[:-1], len(weight)))
        under_way = []
        for at in pieces.cuts(len(rows), chunks):
            piece = pieces.sum_products([rows[at]], [weight], y.view(-1, len(weight))[at])
            under_way.append(axis.start_all_reduce(piece))
        for work in under_way:
            work.wait()
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _save(ctx, 2, (*inputs, None))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        (dy,), wants = grads, ctx.needs_input_grad[2:]
        return None, None, *_once(functools.partial(_backward_of_summed, wants), x, weight, dy)


def _backward_of_summed(wants: Sequence[bool], x: Tensor | None, weight: Tensor, dy: Tensor) -> tuple:
    dx = torch.matmul(dy, weight) if wants[0] else None
    return dx, *_of_parameters(wants[1:], x, [dy])


class _Gathered(Function):
    takes, gives = "pieces", "pieces"

    @staticmethod
    def forward(axis: Axis, dim: int, chunks: int, x: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        n = len(parameters) // 2
        part = pieces.rows_of_part(x, dim)
        outs, _ = pieces.gathered_products(part, parameters[:n], parameters[n:], axis, chunks)
        shape = [*x.shape[:dim], x.shape[dim] * axis.size, *x.shape[dim + 1 : -1]]
        return tuple(y.view(*shape, y.shape[-1]) for y in outs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        _save(ctx, 3, inputs)
        ctx.shape = inputs[3].shape

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        x, *weights = ctx.saved_tensors
        compute = functools.partial(_backward_of_gathered, *ctx.options, ctx.shape, ctx.needs_input_grad[3:])
        return None, None, None, *_once(compute, x, *weights, *dys)


def _backward_of_gathered(
    axis: Axis, dim: int, chunks: int, shape: Sequence[int], wants: Sequence[bool], x: Tensor | None, *tensors: Tensor
) -> tuple:
    n = len(tensors) // 2
    weights, dys = [w.t() for w in tensors[:n]], tensors[n:]
    whole, gather = (None, DONE) if x is None else pieces.start_gather(pieces.rows_of_part(x, dim), axis)
    wait = None
    if wants[0]:
        by_ranks = [pieces.rows_of_whole(dy, dim, axis.size) for dy in dys]
        # One sum where gradients of weights hide it: they take as long as the products that pieces would hide behind.
        wait = pieces.start_scattered_products(by_ranks, weights, axis, chunks if x is None else 1)
    gather.wait()
    gradients = _of_parameters(wants[1:], None if whole is None else whole.transpose(0, 1), dys)
    return None if wait is None else wait().view(shape), *gradients


class _Scattered(Function):
    takes, gives = "pieces", "pieces"

    @staticmethod
    def forward(axis: Axis, dim: int, chunks: int, x: Tensor, weight: Tensor) -> Tensor:
        by_ranks = pieces.rows_of_whole(x, dim, axis.size)
        y = pieces.start_scattered_products([by_ranks], [weight], axis, chunks)()
        return y.view(*x.shape[:dim], x.shape[dim] // axis.size, *x.shape[dim + 1 : -1], len(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _save(ctx, 3, (*inputs, None))
        ctx.shape = inputs[3].shape

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        compute = functools.partial(_backward_of_scattered, *ctx.options, ctx.shape, ctx.needs_input_grad[3:])
        return None, None, None, *_once(compute, x, weight, grads[0])


def _backward_of_scattered(
    axis: Axis,
    dim: int,
    chunks: int,
    shape: Sequence[int],
    wants: Sequence[bool],
    x: Tensor | None,
    weight: Tensor,
    dy: Tensor,
) -> tuple:
    weights = [weight.t()] if wants[0] else []  # without a product of its own, the gather is of one piece
    dxs, whole = pieces.gathered_products(
        pieces.rows_of_part(dy, dim), weights, [None] * len(weights), axis, chunks if wants[0] else 1, keeps=wants[1]
    )
    dx = dxs[0].view(shape) if wants[0] else None
    return dx, *([None] if whole is None else _of_parameters(wants[1:], x, [whole]))


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


def _save(ctx: Any, num_options: int, inputs: tuple) -> None:
    """Keep the options, and of options, x, weights and biases what backward needs: x only for a weight's gradient."""
    ctx.options, x, parameters = inputs[:num_options], inputs[num_options], inputs[num_options + 1 :]
    weights = parameters[: len(parameters) // 2]
    wanted = any(ctx.needs_input_grad[num_options + 1 :][: len(weights)])
    ctx.save_for_backward(x if wanted else None, *weights)


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
