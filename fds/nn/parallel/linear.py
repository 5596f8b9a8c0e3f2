"""Linear layers and embeddings of which every rank of a tensor axis has a piece.

    column   y_r = enter(x) @ W_r^T + b_r         W_r, b_r: this rank's rows of (out, in), its columns of the product
    row      y = leave(x_r @ W_r^T) + b           W_r: this rank's columns of (out, in); b whole, added once
    vocab    y = leave(W_r[ids])                  W_r: this rank's rows; 0 for ids of others

A row after a column, with anything elementwise between, is the two plain layers. On one rank both are plain.
Sends: a row the activation (all_reduce), and a column as much in backward; with parts of sequences, each gathers and
scatters it once in forward and once in backward, which is as much.
Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fds.errors import LossError, is_int
from fds.nn.parallel import checking
from fds.nn.parallel.region import Region, join_features, ranges

# this rank's product -> the same with what is added to it, before ranks exchange it
Beside = Callable[[Tensor], Tensor]


class Piece:
    """What a layer knows of the pieces of its parameters; in a module of the user's, nothing: it is a plain layer.

    `fds.tensor_parallel` fills these in the copies of modules that a step runs.
    """

    region: Region | None = None
    run: str | None = None  # of blocks in which it is, where activations are parts of sequences
    gather: bool = False  # whether what is computed in pieces is put together
    cut: tuple[int, ...] = ()  # the lengths of the parts of what is cut
    alone: bool = False  # whether no other layer beside it is given what it is given


class ColumnLinear(Piece, nn.Linear):
    """A linear layer whose outputs are divided over the tensor axis of `fds.tensor_parallel`; a plain one without it.

    Args:
        in_features: of x.
        out_features: of the result, on all ranks together.
        bias: whether there is one; it is divided too.
        parts: of several projections in one matrix, each divided by itself: how many equal ones, or their lengths.
        gather: whether every rank gets the whole result, else it has its piece, for a `RowLinear`.

    Raises `LossError` for parts that do not add up to `out_features`, and for what is not a size or a flag.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        parts: int | tuple[int, ...] = 1,
        gather: bool = False,
        **factory: Any,
    ):
        checking.sizes("ColumnLinear", in_features=in_features, out_features=out_features)
        checking.flags("ColumnLinear", LossError, bias=bias, gather=gather)
        checking.factory("ColumnLinear", factory)
        super().__init__(in_features, out_features, bias, **factory)
        self.parts = lengths(parts, out_features, type(self).__name__)
        self.gather = gather

    def forward(self, x: Tensor, *, beside: Beside | None = None) -> Tensor:
        """Return this rank's columns of the product (..., out / ranks), or all (..., out) where they are gathered.

        `beside` changes this rank's columns before.
        """
        return through_columns(self, x, self.weight, self.bias, beside)


class RowLinear(Piece, nn.Linear):
    """A linear layer whose inputs are divided over the tensor axis of `fds.tensor_parallel`; a plain one without it.

    It takes what a `ColumnLinear` returned, and returns what all ranks have alike. Arguments are those of `nn.Linear`;
    raises `LossError` for what is not a size or a flag.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **factory: Any):
        checking.sizes("RowLinear", in_features=in_features, out_features=out_features)
        checking.flags("RowLinear", LossError, bias=bias)
        checking.factory("RowLinear", factory)
        super().__init__(in_features, out_features, bias, **factory)

    def forward(self, x: Tensor, *, beside: Beside | None = None) -> Tensor:
        """Return the product (..., out), given this rank's piece of the inputs (..., in / ranks).

        `beside` changes this rank's term of the sum.
        """
        return through_rows(self, x, self.weight, self.bias, beside)


class ColumnConv1D(Piece, nn.Module):
    """A copy of a linear layer whose weight is (in, out), as GPT-2's, divided as a `ColumnLinear`."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor, *, beside: Beside | None = None) -> Tensor:
        """Return this rank's columns of the product; see `ColumnLinear`."""
        return through_columns(self, x, self.weight.T, self.bias, beside)


class RowConv1D(Piece, nn.Module):
    """A copy of a linear layer whose weight is (in, out), as GPT-2's, divided as a `RowLinear`."""

    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor, *, beside: Beside | None = None) -> Tensor:
        """Return the product; see `RowLinear`."""
        return through_rows(self, x, self.weight.T, self.bias, beside)


def through_columns(layer: Piece, x: Tensor, weight: Tensor, bias: Tensor | None, beside: Beside | None) -> Tensor:
    """Return the columns of a product that this rank has the weights of, changed by `beside`."""
    region = layer.region
    if region is None:
        return _changed(F.linear(x, weight, bias), beside)
    if region.overlaps and layer.alone and beside is None:
        y = region.columns(x, weight, bias, run=layer.run)
    else:
        y = _changed(F.linear(region.enter(x, run=layer.run), weight, bias), beside)
    if layer.gather:
        return join_features(y, region.axis, layer.cut)
    region.inside_of(layer.cut, y)
    return y


def through_rows(layer: Piece, x: Tensor, weight: Tensor, bias: Tensor | None, beside: Beside | None) -> Tensor:
    """Return a product of which every rank has the weights of some of the inputs, and a term that `beside` changes."""
    region = layer.region
    if region is None:
        return _changed(F.linear(x, weight, bias), beside)
    change = None if beside is None else functools.partial(_changed, beside=beside)
    y = region.rows(x, weight, layer.cut, run=layer.run, change=change)
    return y if bias is None else y + bias.to(y.dtype)


def _changed(y: Tensor, beside: Beside | None) -> Tensor:
    if beside is None:
        return y
    with torch._C.DisableTorchFunction():  # private; it knows that it is given pieces, and draws for the whole itself
        return beside(y)


def is_product(module: nn.Module) -> bool:
    """Say whether a module is an `nn.Linear`, or one of a class of its own whose forward computes the same.

    That is tried: with a small weight and bias, in training and in evaluation.
    """
    if not isinstance(module, nn.Linear) or isinstance(module, Piece):
        return False
    if type(module) is nn.Linear:
        return True
    params = module._parameters  # pyright: ignore[reportPrivateUsage]
    if params.keys() != {"weight", "bias"} or any(module.children()) or module.weight.dim() != 2:
        return False
    num_out, num_in = 3, 5
    x, w, b = (torch.arange(1.0, 1 + n) ** 0.5 for n in (4 * num_in, num_out * num_in, num_out))
    x, w, b = x.view(2, 2, num_in).sin(), w.view(num_out, num_in).cos(), b if params["bias"] is not None else None
    small = copy.copy(module)
    small.__dict__ |= {"_parameters": {"weight": w, "bias": b}, "in_features": num_in, "out_features": num_out}
    for small.training in (True, False):
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                y = small.forward(x)
        except Exception:  # whatever it needs, it is more than a product
            return False
        want = F.linear(x, w, b)
        if not isinstance(y, Tensor) or y.shape != want.shape or not torch.allclose(y, want):
            return False
    return True


def lengths(parts: int | tuple[int, ...], whole: int, where: str) -> tuple[int, ...]:
    """Return the lengths of the parts of a dim. Raises `LossError` where they are not those of the dim."""
    if is_int(parts, 1) and whole % parts == 0:  # pyright: ignore[reportOperatorIssue]
        return (whole // parts,) * parts  # pyright: ignore[reportReturnType,reportOperatorIssue]
    if isinstance(parts, tuple) and all(is_int(n, 1) for n in parts) and sum(parts) == whole:
        return parts
    raise LossError(
        "these are not the parts of a projection",
        where=f"{where}: parts",
        got=repr(parts)[:80],
        want=f"how many equal ones, or their lengths, which add up to {whole}",
    )


class VocabEmbedding(Piece, nn.Embedding):
    """An embedding whose rows are divided over the tensor axis of `fds.tensor_parallel`; a plain one without it.

    Args:
        num_embeddings: how many rows, on all ranks together.
        embedding_dim: how long each is.
        padding_idx: of the row that is 0 and gets no gradient, from -num_embeddings on; None for none.

    Raises `LossError` for anything else.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, **factory: Any):
        checking.sizes("VocabEmbedding", num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        if padding_idx is not None and not (is_int(padding_idx) and -num_embeddings <= padding_idx < num_embeddings):
            raise LossError(
                "VocabEmbedding: there is no such row",
                where="padding_idx",
                got=repr(padding_idx)[:80],
                want=f"an int in [-{num_embeddings}, {num_embeddings}), or None",
            )
        checking.factory("VocabEmbedding", factory)
        super().__init__(num_embeddings, embedding_dim, padding_idx, **factory)

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows (..., features) of ids (...) int64."""
        region = self.region
        if region is None:
            return super().forward(input)
        first, count = ranges(sum(self.cut), region.axis)[region.axis.index]
        local = input - first
        elsewhere = (local < 0) | (local >= count)
        padding = None if self.padding_idx is None else self.padding_idx - first
        local_padding = padding if padding is not None and 0 <= padding < count else None
        weight, ids = self.weight, local.masked_fill(elsewhere, 0)
        rows = F.embedding(ids, weight, local_padding, sparse=self.sparse)
        return region.leave(rows.masked_fill(elsewhere[..., None], 0.0), run=self.run)


class ColumnEmbedding(Piece, nn.Embedding):
    """A copy of an embedding of which every rank has some of the features."""

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's features (..., features / ranks) of ids (...) int64, or all where they are gathered."""
        region, y = self.region, super().forward(input)
        assert region is not None
        if self.gather:
            return join_features(y, region.axis, self.cut)
        if region.heads is None:
            region.inside_of(self.cut, y)
        return y
