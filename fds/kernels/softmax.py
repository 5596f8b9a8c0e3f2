"""Masked softmax over the last dimension with dropout, in one pass: the probabilities of attention.

    probs = softmax(scale * scores + mask)        out = keep * probs / (1 - p)

`scores`, `probs` and `out` are (..., Sq, Sk); rows are the product of all but the last dimension. A column takes part
where a boolean mask is true, where a floating-point one is not -inf, and with `causal` where j <= i. A row of which no
column takes part is zero, and so is its gradient. With g = keep * dout / (1 - p)::

    dscores = scale * probs * (g - sum_j(g * probs))

Moves: forward reads scores (and the mask, often from cache) and writes probs, and out too where p > 0; backward reads
probs and dout and writes dscores. Saves: probs, which without dropout is the output itself, and the seed.
Sources:
1. Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3: the maximum and the sum of a row in one pass.
2. Srivastava et al. 2014, JMLR 15:1929: dropout, here scaled in training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fds.errors import KernelError
from fds.kernels import arguments, philox, tiles
from fds.kernels.choice import runs_triton
from fds.kernels.language import cdiv, jit, next_power_of_2, on, tl
from fds.kernels.operators import Function, first_order, operator


def reference(
    scores: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False, p: float = 0.0,
    seed: Tensor | None = None, offset: int = 0,
) -> Tensor:
    """Return the same in plain torch, with gradients of any order; backward needs more memory."""
    return philox.dropout(_probabilities(scores, mask, scale, causal), seed, offset, p).to(scores.dtype)


def _probabilities(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    s = scores.to(arguments.width(scores)) * scale
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(), float("-inf"))
    if not s.shape[-1]:
        return s
    is_empty = s.detach().amax(-1, keepdim=True) == float("-inf")
    return s.masked_fill(is_empty, 0.0).softmax(-1).masked_fill(is_empty, 0.0)


class _Saved(Function):
    """The reference, which saves as little as the kernel; backward is differentiable, because `probs` is an output."""

    @staticmethod
    def forward(
        scores: Tensor, mask: Tensor | None, scale: float, causal: bool, p: float, seed: Tensor | None, offset: int
    ) -> tuple[Tensor, Tensor | None]:
        probs = _probabilities(scores, mask, scale, causal)
        if probs.dtype != scores.dtype:  # see fds.kernels.normalization.scaled
            probs = probs.to(scores.dtype)
        return (philox.dropout(probs, seed, offset, p), probs) if p else (probs, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dprobs: Tensor | None) -> tuple:
        probs, seed = ctx.saved_tensors
        wide = arguments.width(probs)
        y = probs.to(wide)
        g = 0.0 if dout is None else philox.dropout(dout.to(wide), seed, ctx.offset, ctx.p)
        g = g if dprobs is None else g + dprobs
        dscores = ctx.scale * y * (g - (g * y).sum(-1, keepdim=True))
        return dscores.to(probs.dtype), *[None] * 6


# Sixteen elements per thread: two 16-byte loads in flight per 16-bit tensor, four per float32 tensor, and 16 registers
# for a tile in float32. Rows of up to WHOLE columns stay in registers (sixteen warps); longer ones are read twice, in
# chunks, the second time mostly from L2: with 65536 columns in 16 bits, two programs on each of 132 multiprocessors use
# 35 MB of its 50. Short rows share a program. Derived, not measured.
LAUNCH = {"TILE": 2048, "WHOLE": 8192, "CHUNK": 4096, "per_thread": 16}


def _launch(queries: int, columns: int) -> dict[str, int]:
    is_whole = columns <= LAUNCH["WHOLE"]
    block = max(next_power_of_2(columns), 16) if is_whole else LAUNCH["CHUNK"]
    rows = min(max(LAUNCH["TILE"] // block, 1), next_power_of_2(queries))
    num_warps = min(max(rows * block // (32 * LAUNCH["per_thread"]), 1), 16)
    return {"ROWS": rows, "BLOCK": block, "WHOLE": is_whole, "num_warps": num_warps}


@jit
def _load(
    scores_ptr, mask_ptr, start, query, column, num_queries, num_columns, mask_sq, mask_sk, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr,
):
    """Return scale * scores + mask of a tile in float32, -inf where a column takes no part."""
    inside = (query < num_queries)[:, None] & (column < num_columns)[None, :]
    takes_part = inside
    if CAUSAL:
        takes_part = inside & (column[None, :] <= query[:, None])
        # columns that no query of the tile sees are not read; the bound is a multiple of 16, which keeps vector loads
        inside = inside & (column < (tl.max(query, 0) // 16 + 1) * 16)[None, :]
    at = start + query[:, None].to(tl.int64) * num_columns + column[None, :]
    s = tl.load(scores_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
    if MASK != "none":
        mask_at = query[:, None].to(tl.int64) * mask_sq + column[None, :].to(tl.int64) * mask_sk
        mask = tl.load(mask_ptr + mask_at, mask=inside, other=0)
        if MASK == "boolean":
            takes_part = takes_part & (mask != 0)
        else:
            s += mask.to(tl.float32)
    return tl.where(takes_part, s, -float("inf"))


@jit
def _finite(maximum):
    """Return what to subtract before exp: the maximum, or 0 where no column takes part."""
    return tl.where(maximum == -float("inf"), 0.0, maximum)


@jit
def _store(
    out_ptr, probs_ptr, probs, start, row, query, first_column, num_queries, num_columns, seed_ptr, offset, threshold,
    kept_scale, DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):
    column = first_column + tl.arange(0, BLOCK)
    inside = (query < num_queries)[:, None] & (column < num_columns)[None, :]
    at = start + query[:, None].to(tl.int64) * num_columns + column[None, :]
    if DROPOUT:
        tl.store(probs_ptr + at, probs.to(probs_ptr.dtype.element_ty), mask=inside)
        keep = philox.keep(tl.load(seed_ptr), offset, row, first_column, threshold, BLOCK)
        probs = tl.where(keep, probs * kept_scale, 0.0)
    tl.store(out_ptr + at, probs.to(out_ptr.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["offset", "threshold"])
def _forward_kernel(
    scores_ptr, mask_ptr, out_ptr, probs_ptr, seed_ptr, offset, threshold, kept_scale, scale,
    num_queries, num_columns, inner, mask_sa, mask_sb, mask_sq, mask_sk,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):
    tiles = tl.cdiv(num_queries, ROWS)
    ab = tl.program_id(0) // tiles
    query = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    start = ab.to(tl.int64) * num_queries * num_columns
    row = ab.to(tl.int64) * num_queries + query
    mask_ptr += (ab // inner).to(tl.int64) * mask_sa + (ab % inner).to(tl.int64) * mask_sb
    if WHOLE:
        s = _load(scores_ptr, mask_ptr, start, query, tl.arange(0, BLOCK), num_queries, num_columns, mask_sq, mask_sk,
                  scale, MASK, CAUSAL)
        e = tl.exp(s - _finite(tl.max(s, 1))[:, None])
        total = tl.sum(e, 1)
        probs = e * (1 / tl.where(total == 0, 1.0, total))[:, None]
        _store(out_ptr, probs_ptr, probs, start, row, query, 0, num_queries, num_columns, seed_ptr, offset, threshold,
               kept_scale, DROPOUT, BLOCK)
    else:
        maximum = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        for first in range(0, num_columns, BLOCK):
            s = _load(scores_ptr, mask_ptr, start, query, first + tl.arange(0, BLOCK), num_queries, num_columns,
                      mask_sq, mask_sk, scale, MASK, CAUSAL)
            now = tl.maximum(maximum, tl.max(s, 1))
            total = total * tl.exp(maximum - _finite(now)) + tl.sum(tl.exp(s - _finite(now)[:, None]), 1)
            maximum = now
        inverse = (1 / tl.where(total == 0, 1.0, total))[:, None]
        for first in range(0, num_columns, BLOCK):
            s = _load(scores_ptr, mask_ptr, start, query, first + tl.arange(0, BLOCK), num_queries, num_columns,
                      mask_sq, mask_sk, scale, MASK, CAUSAL)
            probs = tl.exp(s - _finite(maximum)[:, None]) * inverse
            _store(out_ptr, probs_ptr, probs, start, row, query, first, num_queries, num_columns, seed_ptr, offset,
                   threshold, kept_scale, DROPOUT, BLOCK)


@jit
def _load_gradient(
    dout_ptr, probs_ptr, row, first, num_rows, num_columns, seed_ptr, offset, threshold, kept_scale,
    DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
):
    """Return the gradient with respect to the probabilities of a tile and the probabilities, in float32."""
    column = first + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    at = row[:, None] * num_columns + column[None, :]
    probs = tl.load(probs_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if DROPOUT:
        keep = philox.keep(tl.load(seed_ptr), offset, row, first, threshold, BLOCK)
        g = tl.where(keep, g * kept_scale, 0.0)
    return g, probs, at, inside


@jit(do_not_specialize=["offset", "threshold"])
def _backward_kernel(
    dout_ptr, probs_ptr, dscores_ptr, seed_ptr, offset, threshold, kept_scale, scale, num_rows, num_columns,
    DROPOUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if WHOLE:
        g, probs, at, inside = _load_gradient(dout_ptr, probs_ptr, row, 0, num_rows, num_columns, seed_ptr, offset,
                                              threshold, kept_scale, DROPOUT, BLOCK)
        dscores = scale * probs * (g - tl.sum(g * probs, 1)[:, None])
        tl.store(dscores_ptr + at, dscores.to(dscores_ptr.dtype.element_ty), mask=inside)
    else:
        total = tl.zeros((ROWS,), tl.float32)
        for first in range(0, num_columns, BLOCK):
            g, probs, at, inside = _load_gradient(dout_ptr, probs_ptr, row, first, num_rows, num_columns, seed_ptr,
                                                  offset, threshold, kept_scale, DROPOUT, BLOCK)
            total += tl.sum(g * probs, 1)
        for first in range(0, num_columns, BLOCK):
            g, probs, at, inside = _load_gradient(dout_ptr, probs_ptr, row, first, num_rows, num_columns, seed_ptr,
                                                  offset, threshold, kept_scale, DROPOUT, BLOCK)
            dscores = scale * probs * (g - total[:, None])
            tl.store(dscores_ptr + at, dscores.to(dscores_ptr.dtype.element_ty), mask=inside)


def _dropout(p: float, seed: Tensor | None, like: Tensor, offset: int) -> tuple:
    """Return the arguments of the kernels for dropout: seed, offset, threshold, and the factor of kept elements."""
    return like if seed is None else seed, offset, philox.threshold(p), 1 / (1 - p)


def _four_dims(mask: Tensor | None, scores: Tensor) -> tuple[Tensor, str]:
    """Return the mask as (A, inner, Sq, Sk), with strides of 0 where it is broadcast, and its kind."""
    if mask is None:
        return scores.new_empty(()).expand(1, 1, 1, 1), "none"
    kind, (*lead, queries, columns) = "boolean" if mask.dtype == torch.bool else "additive", scores.shape
    mask = mask.view(torch.uint8) if kind == "boolean" else mask.float() if mask.dtype == torch.float64 else mask
    outer = torch.Size(lead[:-1]).numel()  # a copy only where the mask varies in more than two leading dims
    return mask.expand(scores.shape).reshape(outer, lead[-1] if lead else 1, queries, columns), kind


def _empty_outputs(scores: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return tiles.like(scores), tiles.like(scores) if p else scores.new_empty(0)


@operator("masked_softmax", lambda scores, mask, scale, causal, p, *_: _empty_outputs(scores, p))
def _forward(
    scores: Tensor, mask: Tensor | None, scale: float, causal: bool, p: float, seed: Tensor | None, offset: int
) -> tuple[Tensor, Tensor]:
    scores = scores.contiguous()
    out, probs = _empty_outputs(scores, p)
    if out.numel():
        four, kind = _four_dims(mask, scores)
        queries, columns = scores.shape[-2:]
        meta = _launch(queries, columns)
        grid = (scores.shape[:-2].numel() * cdiv(queries, meta["ROWS"]),)
        with on(scores):
            _forward_kernel[grid](
                scores, four, out, probs, *_dropout(p, seed, scores, offset), scale, queries, columns, four.shape[1],
                *four.stride(), MASK=kind, CAUSAL=causal, DROPOUT=p > 0, **meta,
            )
    return out, probs


@operator("masked_softmax_backward", lambda dout, probs, *_: tiles.like(probs))
def _backward(dout: Tensor, probs: Tensor, scale: float, p: float, seed: Tensor | None, offset: int) -> Tensor:
    dout, probs = dout.contiguous(), probs.contiguous()
    dscores = torch.empty_like(probs)
    if dscores.numel():
        rows, columns = probs.shape[:-1].numel(), probs.shape[-1]
        meta = _launch(rows, columns)
        with on(probs):
            _backward_kernel[(cdiv(rows, meta["ROWS"]),)](
                dout, probs, dscores, *_dropout(p, seed, probs, offset), scale, rows, columns, DROPOUT=p > 0, **meta
            )
    return dscores


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    """Save the probabilities (the output itself without dropout) and the seed.

    Neither output is marked as non-differentiable: second derivatives go through the saved tensors.
    """
    _, _, ctx.scale, _, ctx.p, seed, ctx.offset = inputs
    out, probs = output
    ctx.save_for_backward(out if probs is None else probs, seed)
    ctx.set_materialize_grads(False)  # or zeros as large as probs would be made


class _Softmax(Function):
    @staticmethod
    def forward(
        scores: Tensor, mask: Tensor | None, scale: float, causal: bool, p: float, seed: Tensor | None, offset: int
    ) -> tuple[Tensor, Tensor | None]:
        out, probs = _forward(scores, mask, scale, causal, p, seed, offset)
        return out, probs if p else None

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: Any) -> tuple:
        if dout is None:
            return (None,) * 7
        probs, seed = ctx.saved_tensors
        return first_order(_backward, dout, probs, ctx.scale, ctx.p, seed, ctx.offset), *[None] * 6


def masked_softmax(
    scores: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False, p: float = 0.0,
    seed: int | Tensor | None = None, offset: int = 0,
) -> Tensor:
    """Return dropout(softmax(scale * scores + mask)) over the last dimension, (..., Sq, Sk) as scores.

    A row of which no column takes part is zero, and so is its gradient (torch.softmax gives NaN).

    Args:
        scores: (..., Sq, Sk) float32, float16 or bfloat16 (float64 by the reference).
        mask: a floating-point mask is added to the scaled scores; in a boolean one, columns that are true take part.
            Any shape that broadcasts to that of scores, such as (B, 1, 1, Sk) or (B, 1, Sq, Sk). No gradient.
        scale: multiplies the scores.
        causal: query i sees the columns j <= i, also where Sq and Sk differ (as in torch's attention).
        p: the probability of dropping an element; the others are divided by 1 - p.
        seed: an integer, or () int64 on the device of scores; needed where p > 0.
        offset: index of the mask among those of one seed; see fds.kernels.philox.

    Raises `KernelError` for any other dtype or device, a mask that does not broadcast or requires a gradient, p
    outside [0, 1), or a missing seed.
    """
    arguments.floating(scores=scores)
    _check_scores(scores)
    _check_mask(mask, scores)
    arguments.ratio("p", p)
    seed = philox.as_seed(seed, scores.device) if p else None
    args = (scores, mask, float(scale), bool(causal), float(p), seed, offset)
    return (_Softmax if runs_triton("masked_softmax", scores) else _Saved).apply(*args)[0]


def _check_scores(scores: Tensor) -> None:
    if scores.dim() < 2:
        raise KernelError("scores has too few dims", where="scores", got=str(tuple(scores.shape)), want="(..., Sq, Sk)")


def _check_mask(mask: Tensor | None, scores: Tensor) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        arguments.floating(scores=scores, mask=mask)
    if mask.device != scores.device:
        raise KernelError("mask is on another device than scores", where="mask", got=str(mask.device),
                          want=str(scores.device), hint="mask.to(scores.device)")
    aligned = zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    if mask.dim() > scores.dim() or any(n not in (1, m) for n, m in aligned):
        raise KernelError("mask does not broadcast to scores", where="mask", got=str(tuple(mask.shape)),
                          want=f"dims of {tuple(scores.shape)}, or 1")
    if mask.requires_grad and torch.is_grad_enabled():
        raise KernelError("mask gets no gradient, and requires one", where="mask", got="requires_grad=True",
                          want="a constant", hint="mask.detach(), or add a learned bias to scores")
