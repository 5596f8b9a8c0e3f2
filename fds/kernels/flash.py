"""Attention without the matrix of scores in memory: softmax(q k^T) v by blocks, with masks, bias and dropout.

q (B, H, Sq, D), k and v (B, G, Sk, D), where G divides H and head h reads keys and values h // (H / G)::

    s = scale * q k^T + bias, -inf where masked       lse = log(sum_j exp(s_ij))      p = exp(s - lse)
    out = (p * keep / (1 - ratio)) v                  keep = the Philox mask of (B * H * Sq, Sk)

Moves: forward reads q once, k and v once for each block of queries (mostly from the L2 cache), writes out and lse;
nothing of Sq x Sk. Saves: q, k, v, masks and seed as given, out, and lse (B, H, Sq) float32 in base 2.

Sources: Milakov and Gimelshein 2018, arXiv:1805.02867 (softmax in one pass); Dao et al. 2022, arXiv:2205.14135,
algorithms 1 and 2; Dao 2023, arXiv:2307.08691 (queries in parallel, scaling once at the end).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fds.errors import KernelError
from fds.kernels import arguments, philox
from fds.kernels.arguments import attention as check, positive
from fds.kernels.choice import is_demanded, runs_triton
from fds.kernels.flash_backward import backward
from fds.kernels.flash_blocks import (
    COUNTS,
    LEAST_BIAS,
    LOG2E,
    biased,
    blocks,
    dot,
    empty_numbers,
    empty_rows,
    in_vectors,
    key_ranges,
    kind,
    load_rows,
    masked,
    operands,
    options,
    query_block,
    store_numbers,
    store_rows,
)
from fds.kernels.language import cdiv, fitting, jit, on, tl
from fds.kernels.operators import Function, first_order, operator
from fds.kernels.philox import keep

MOST_BYTES = 512  # of a row of q that fits into a block


def reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_padding: Tensor | None = None,
    bias: Tensor | None = None, documents: Tensor | None = None, scale: float | None = None, p: float = 0.0,
    seed: Tensor | None = None, offset: int = 0,
) -> Tensor:
    """Return the same in plain torch, in float32 or wider, with all scores in memory; `seed` is () int64."""
    probabilities, kept = _probabilities(q, k, key_padding, bias, seed, documents, causal, _scale(q, scale), p, offset)
    return (probabilities * kept @ _heads(v, q)).to(q.dtype)


def _probabilities(q, k, key_padding, bias, seed, documents, causal, scale, p, offset) -> tuple[Tensor, Tensor | float]:
    """Return softmax(q k^T), zero in rows without any key, and the factor of dropout."""
    b, h, m, n = *q.shape[:3], k.shape[2]
    s = _wide(q) @ _heads(k, q).mT * scale
    if bias is not None:
        s = s + bias.masked_fill(bias < LEAST_BIAS, -math.inf)
    if key_padding is not None:
        s = s.masked_fill(~key_padding[:, None, None, :], -math.inf)
    if documents is not None:
        s = s.masked_fill((documents[:, :, None] != documents[:, None, :])[:, None], -math.inf)
    if causal:
        s = s.masked_fill(torch.ones(m, n, dtype=torch.bool, device=q.device).tril().logical_not(), -math.inf)
    if bias is not None or key_padding is not None:
        unseen = (s == -math.inf).all(-1, keepdim=True)
        probabilities = s.masked_fill(unseen, 0.0).softmax(-1).masked_fill(unseen, 0.0)
    else:
        probabilities = s.softmax(-1)  # a query sees at least key 0, or itself
    if p == 0:
        return probabilities, 1.0
    kept = philox.reference(seed, offset, b * h * m, n, p).view(b, h, m, n)
    return probabilities, kept.to(s.dtype) / (1 - p)


def _wide(x: Tensor) -> Tensor:
    return x.to(arguments.width(x))


def _heads(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values repeated for each head of queries, (B, H, Sk, D)."""
    x = _wide(x)
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _scale(q: Tensor, scale: float | None) -> float:
    return max(q.shape[-1], 1) ** -0.5 if scale is None else scale


# By (columns, bytes per element, what takes many registers) and KiB of shared memory: blocks of queries and keys, warps
# and stages. Derived, not measured (`python -m benchmarks.attention_tables` measures): a warp group multiplies 64 rows,
# two groups share the loads, and blocks are the largest found that spill no registers on sm_90 but for some bytes with
# a few combinations of masks. A product of float32 is computed as three of TF32, and takes many registers.
LAUNCH = {
    (64, 2, ""): {227: blocks(128, 128, 8, 3, tma=True), 99: blocks(128, 128, 8, 3)},
    (64, 2, "masked"): {227: blocks(128, 64, 8, 3, tma=True), 99: blocks(128, 64, 8, 3)},
    (64, 2, "bias"): {227: blocks(128, 64, 8, 3, tma=True), 99: blocks(128, 64, 8, 3)},
    (128, 2, ""): {227: blocks(128, 128, 8, 2, tma=True), 99: blocks(128, 64, 8, 3)},
    (128, 2, "masked"): {227: blocks(128, 64, 8, 2, tma=True), 99: blocks(128, 32, 8, 3)},
    (128, 2, "bias"): {227: blocks(128, 64, 8, 2, tma=True), 99: blocks(128, 32, 8, 3)},
    (256, 2, ""): {227: blocks(128, 64, 8, 2, tma=True), 99: blocks(64, 32, 8, 2)},
    (256, 2, "masked"): {227: blocks(64, 32, 8, 2, tma=True), 99: blocks(64, 32, 8, 2)},
    (256, 2, "bias"): {227: blocks(64, 32, 8, 2, tma=True), 99: blocks(64, 32, 8, 2)},
    (64, 4, ""): {99: blocks(32, 16, 4, 2)},
    (64, 4, "masked"): {99: blocks(32, 32, 4, 2)},
    (64, 4, "bias"): {99: blocks(32, 32, 4, 2)},
    (128, 4, ""): {99: blocks(16, 32, 8, 2)},
    (128, 4, "masked"): {99: blocks(16, 32, 8, 2)},
    (128, 4, "bias"): {99: blocks(16, 32, 8, 2)},
}


@jit(do_not_specialize=COUNTS)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, key_padding_ptr, bias_ptr, seed_ptr, query_documents_ptr, key_documents_ptr,
    q_strides, k_strides, v_strides, key_padding_strides, bias_strides, query_documents_strides, key_documents_strides,
    num_heads, num_queries, num_keys, scale, offset, threshold, kept_scale,
    CAUSAL: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, TMA: tl.constexpr,
):
    bh, b, h, first = query_block(num_heads, num_queries, CAUSAL, QUERIES)
    i = first + tl.arange(0, QUERIES)

    q = load_rows(q_ptr, b, h, first, q_strides, num_queries, D, QUERIES, BLOCK_D)
    factor = scale * LOG2E  # of products, to scores in base 2; with a bias they are multiplied before it is added
    if BIAS != "":
        factor = 1.0

    highest = tl.full([QUERIES], float("-inf"), tl.float32)  # before `factor`, which is positive
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    whole, last = key_ranges(first, num_keys, CAUSAL, QUERIES, KEYS)
    for EDGE in tl.static_range(2):  # blocks of keys that all queries see, then those at the edge
        for start in range(whole if EDGE else 0, last if EDGE else whole, KEYS):
            j = start + tl.arange(0, KEYS)
            k = load_rows(k_ptr, b, h // GROUP, start, k_strides, num_keys, D, KEYS, BLOCK_D)
            scores = dot(q, tl.trans(k), None)
            if BIAS != "":
                scores = biased(
                    scores * (scale * LOG2E), b, h, i[:, None], j[None, :], num_queries, num_keys, bias_ptr,
                    bias_strides, BIAS,
                )
            scores = masked(
                scores, float("-inf"), b, i[:, None], j[None, :], num_queries, num_keys, key_padding_ptr,
                key_padding_strides, query_documents_ptr, query_documents_strides, key_documents_ptr,
                key_documents_strides, CAUSAL and EDGE, EDGE, HAS_PADDING, HAS_DOCUMENTS,
            )
            now = tl.maximum(highest, tl.max(scores, 1))
            base = now
            if HAS_PADDING or HAS_DOCUMENTS or BIAS != "":
                base = tl.where(now == float("-inf"), 0.0, now)  # no key yet
            shrink = tl.exp2((highest - base) * factor)
            weights = tl.exp2(scores * factor - (base * factor)[:, None])  # one multiply-add and exp2 an element
            total = total * shrink + tl.sum(weights, 1)
            if DROPOUT:
                kept = keep(tl.load(seed_ptr), offset, bh * num_queries + i, start, threshold, KEYS)
                weights = tl.where(kept, weights, 0.0)
            v = load_rows(v_ptr, b, h // GROUP, start, v_strides, num_keys, D, KEYS, BLOCK_D)
            sums = dot(weights.to(v.dtype), v, sums * shrink[:, None])
            highest = now

    has_keys = total != 0
    total = tl.where(has_keys, total, 1.0)
    lse = tl.where(has_keys, highest * factor + tl.log2(total), float("inf"))  # inf: weights of 0 in backward
    store_numbers(lse_ptr, lse, bh, i, num_queries)
    out = sums * (kept_scale / total)[:, None]
    store_rows(out_ptr, out, b, h, i, num_heads, num_queries, D, BLOCK_D)


@operator("flash_attention", lambda q, *_: (empty_rows(q), empty_numbers(q)))
def _forward(
    q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, bias: Tensor | None, seed: Tensor | None,
    query_documents: Tensor | None, key_documents: Tensor | None, causal: bool, scale: float, p: float, offset: int,
) -> tuple[Tensor, Tensor]:  # without key_documents those of queries
    out, lse, d = empty_rows(q), empty_numbers(q), q.shape[3]
    if not k.numel():  # no key, or no column
        return out.zero_(), lse.fill_(math.inf)
    q, k, v = in_vectors(q), in_vectors(k), in_vectors(v)
    row = fitting(LAUNCH[kind(q, key_padding, bias, query_documents, p)], q.device)
    if out.numel():
        with on(q):
            _forward_kernel[(q.shape[0] * q.shape[1] * cdiv(q.shape[2], row["QUERIES"]),)](
                out_ptr=out, lse_ptr=lse, **operands(row, "q", q=q, k=k, v=v),
                **options(q, k, d, key_padding, bias, seed, query_documents, key_documents, causal, scale, p, offset),
                **row,
            )
    return out, lse


class _Flash(Function):
    @staticmethod
    def forward(
        q, k, v, key_padding, bias, seed, query_documents, key_documents, causal, scale, p, offset
    ) -> tuple[Tensor, Tensor]:
        return _forward(q, k, v, key_padding, bias, seed, query_documents, key_documents, causal, scale, p, offset)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:8], *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # or zeros would be made for lse
        ctx.options = inputs[8:]

    @staticmethod
    def backward(ctx, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 12
        return *first_order(backward, dout, *ctx.saved_tensors, *ctx.options), *[None] * 9


class _Recomputed(Function):
    """The reference, which saves as little as the kernel (without lse): backward computes the scores again."""

    @staticmethod
    def forward(q, k, v, key_padding, bias, seed, documents, causal, scale, p, offset) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):  # q, k and v are already cast
            out = reference(
                q, k, v, causal=causal, key_padding=key_padding, bias=bias, documents=documents, scale=scale, p=p,
                seed=seed, offset=offset,
            )
        # Laid out as by the kernel, so that merging the heads makes no copy. Not written in place: torch.compile of
        # torch 2.11 then gives gradients of zero (github.com/pytorch/pytorch/issues/180642).
        return out.transpose(1, 2).contiguous().transpose(1, 2)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:7], output)
        ctx.options = inputs[7:]

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *masks, out = ctx.saved_tensors
        scale = ctx.options[1]
        probabilities, kept = _probabilities(q, k, *masks, *ctx.options)
        dout = _wide(dout)
        dp = dout @ _heads(v, q).mT * kept
        ds = probabilities * (dp - (dout * _wide(out)).sum(-1, keepdim=True)) * scale
        group = lambda x: x.view(*k.shape[:2], q.shape[1] // max(k.shape[1], 1), *k.shape[2:]).sum(2)
        dq, dk, dv = ds @ _heads(k, q), group(ds.mT @ _wide(q)), group((probabilities * kept).mT @ dout)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *[None] * 8


def kernel_runs(q: Tensor) -> bool:
    """Return whether the kernel, not the reference, runs on such queries; raises where only it may and cannot."""
    return q.shape[-1] * q.element_size() <= MOST_BYTES and runs_triton("flash_attention", q)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_padding: Tensor | None = None,
    bias: Tensor | None = None, documents: Tensor | None = None, scale: float | None = None, p: float = 0.0,
    seed: int | Tensor | None = None, offset: int = 0,
) -> Tensor:
    """Return softmax(scale * q k^T + bias) v, (B, H, Sq, D), without the scores in memory, in backward too.

    A query that sees no key gives zeros, and zero gradients.

    Args:
        q: (B, H, Sq, D) float32, float16 or bfloat16 (float64 by the reference). The kernel takes D up to 256,
            in float32 up to 128. Any strides; no copy is made where the last dimension is contiguous.
        k: (B, G, Sk, D) of q's dtype, where G divides H: query head h reads key head h // (H / G).
        v: as k.
        causal: query i sees keys 0 to i, also where Sq and Sk differ (as torch's `is_causal`).
        key_padding: (B, Sk) bool, False where a key is padding.
        bias: floating, broadcastable to (B, H, Sq, Sk) and never expanded in memory; without a gradient.
            Values below -1e30 mask.
        documents: (B, S) int32 or int64, where Sq = Sk = S: a query sees the keys of the same number alone, as where
            rows are packed of several documents (`fds.data.pack`).
        scale: of the products, finite; 1 / sqrt(D) if None.
        p: probability with which dropout zeroes an attention weight; the others are divided by 1 - p.
        seed: int or () int64 tensor on q's device; dropout needs one.
        offset: index of the mask among those of one seed. Masks are those of `masked_softmax` on scores (B, H, Sq, Sk).

    Under autocast q, k and v are cast as by torch's attention. Raises `KernelError` for any other dtype, shape or
    device, D beyond a block, a bias that requires a gradient, p outside [0, 1), and dropout without a seed.
    """
    arguments.flags(causal=causal)
    q, k, v = arguments.as_products_cast(q, k, v)
    check(q, k, v, key_padding, bias, scale, p, documents)
    is_triton = runs_triton("flash_attention", q)
    is_too_wide = is_triton and q.shape[3] * q.element_size() > MOST_BYTES
    if is_too_wide and is_demanded():
        raise KernelError(
            "the head dimension of q exceeds a block", where="q", got=f"{q.shape[3]} of {q.dtype}",
            want=f"at most {MOST_BYTES // q.element_size()}",
            hint="fds.kernels.attention without dropout and masks; attn_dropout_checkpoint=False in a TransformerLayer",
        )
    is_triton, scale = is_triton and not is_too_wide, _scale(q, scale)
    if is_triton:
        q, scale = positive(q, scale)
    seed = philox.as_seed(seed, q.device) if p else None
    k = k.view_as(k) if k is q else k  # torch.compile does not accept one tensor as two arguments
    v = v.view_as(v) if v is q or v is k else v
    masks, others = (key_padding, bias, seed, documents), (causal, float(scale), float(p), offset)
    if is_triton:
        return _Flash.apply(q, k, v, *masks, None, *others)[0]
    return _Recomputed.apply(q, k, v, *masks, *others)
