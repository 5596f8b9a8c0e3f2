"""How an activation enters and leaves what the ranks of a tensor axis compute together, with the gradients of one loss.

The ranks compute one loss, each with its pieces of some parameters. Between pieces of work that all do alike ("whole")
and those of which each does a part, an activation passes one of these; each is the other one's transpose::

    copied   whole -> whole, for parts of a product:  forward x              backward all_reduce
    summed   terms -> their sum, whole:               forward all_reduce     backward the gradient
    cut      whole -> this rank's piece:              forward piece          backward all_gather
    joined   pieces -> whole:                         forward all_gather     backward piece

Between pieces along the sequence and a product that each does a part of, `fds.collectives.all_gather` and
`reduce_scatter` stand in the place of `copied` and `summed`.
Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (f and g); Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fds.collectives import Axis, operators
from fds.collectives.functional import Linear, apply_function
from fds.errors import FdsError


def copied(x: Tensor, axis: Axis) -> Tensor:
    """Return `x`, which every rank uses for a part of a product: its gradient is the sum of the ranks' gradients."""
    return x if axis.size == 1 else apply_function(_Copied, x, axis)


def summed(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of the ranks' terms, which all go on with alike: its gradient is each term's."""
    return x if axis.size == 1 else apply_function(_Summed, x, axis)


def cut(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's piece of what all have alike, one of `axis.size` equal ones along `dim`, a view.

    Raises `FdsError` where `dim` does not divide.
    """
    if x.shape[dim] % axis.size:
        raise FdsError(
            "a dim cannot be cut into equal pieces",
            where=f"axis {axis.name!r}, {axis.size} ranks",
            got=f"dim {dim} of {tuple(x.shape)}",
            want=f"a multiple of {axis.size}",
        )
    return x if axis.size == 1 else apply_function(_Cut, x, axis, dim % x.dim())


def joined(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return the ranks' pieces one after another along `dim`, with which all go on alike."""
    return x if axis.size == 1 else apply_function(_Joined, x, axis, dim % x.dim())


def _piece(x: Tensor, axis: Axis, dim: int) -> Tensor:
    n = x.shape[dim] // axis.size
    return x.narrow(dim, axis.index * n, n)


class _Copied(Linear):
    takes, gives = "whole", "pieces"  # see `uses`

    @staticmethod
    def forward(x: Tensor, axis: Axis) -> Tensor:
        if torch.compiler.is_compiling():  # dynamo reads no layout
            return x.view_as(x)
        return x.view_as(x) if x.layout is torch.strided else x.detach()  # a sparse batch has no views

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.axis = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return summed(grads[0], ctx.axis), None


class _Summed(_Copied):
    takes, gives = "pieces", "whole"

    @staticmethod
    def forward(x: Tensor, axis: Axis) -> Tensor:
        return operators.all_reduce(x, axis.handle)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return copied(grads[0], ctx.axis), None


class _Cut(Linear):
    takes, gives = "whole", "pieces"

    @staticmethod
    def forward(x: Tensor, axis: Axis, dim: int) -> Tensor:
        return _piece(x, axis, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, ctx.axis, ctx.dim = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return joined(grads[0], ctx.axis, ctx.dim), None, None


class _Joined(_Cut):
    takes, gives = "pieces", "whole"

    @staticmethod
    def forward(x: Tensor, axis: Axis, dim: int) -> Tensor:
        return operators.all_gather(x, axis.handle, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return cut(grads[0], ctx.axis, ctx.dim), None, None
