"""The gradients of `flash_attention` by blocks: the scores are computed again, with lse, and never stored.

With dout the gradient of out, p and keep as in fds.kernels.attentions.flash, and c = 1 / (1 - ratio)::

    delta_i = sum_d dout_id out_id              dv = (p * keep * c)^T dout
    ds = p * (keep * c * dout v^T - delta)      dq = scale * ds k        dk = scale * ds^T q

Two kernels: one over blocks of queries computes delta and dq, the next, over blocks of keys, dk and dv. No sum is
shared between programs, so results are deterministic.
Moves: q, k, v, out, dout, dq, dk, dv and again k and v for each block of queries, q and dout for each block of keys
(mostly from the L2 cache); delta (B, H, Sq) float32 between the two.

Source: Dao et al. 2022, arXiv:2205.14135, algorithm 4; Dao 2023, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fds.kernels.attentions.flash_blocks import (
    COUNTS,
    LOG2E,
    blocks,
    dot,
    empty_rows,
    head,
    in_vectors,
    key_ranges,
    kind,
    load_rows,
    masked,
    options,
    query_block,
    store_rows,
    strides,
)
from fds.kernels.language import cdiv, jit, on, tl
from fds.kernels.operators import operator
from fds.kernels.philox import keep

# As fds.kernels.attentions.flash.LAUNCH, derived, not measured. Of the kernel over queries ...
OVER_QUERIES = {
    (64, 2, False): blocks(128, 64, 8, 2),
    (64, 2, True): blocks(128, 32, 8, 2),
    (128, 2, False): blocks(128, 64, 8, 2),
    (128, 2, True): blocks(128, 32, 8, 2),
    (256, 2, False): blocks(64, 32, 8, 2),
    (256, 2, True): blocks(32, 32, 8, 2),
    (64, 4, False): blocks(32, 32, 8, 2),
    (64, 4, True): blocks(16, 32, 8, 2),
    (128, 4, False): blocks(16, 32, 8, 2),
    (128, 4, True): blocks(16, 32, 8, 1),
}
# ... and of the kernel over keys, which holds two blocks of sums in registers instead of one.
OVER_KEYS = {
    (64, 2, False): blocks(64, 128, 8, 2),
    (64, 2, True): blocks(32, 128, 8, 2),
    (128, 2, False): blocks(32, 128, 8, 2),
    (128, 2, True): blocks(16, 64, 8, 2),
    (256, 2, False): blocks(32, 32, 8, 2),
    (256, 2, True): blocks(32, 32, 8, 2),
    (64, 4, False): blocks(32, 16, 4, 1),
    (64, 4, True): blocks(32, 16, 4, 2),
    (128, 4, False): blocks(16, 16, 8, 1),
    (128, 4, True): blocks(16, 16, 8, 1),
}


@jit(do_not_specialize=COUNTS)
def _queries_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, delta_ptr, dq_ptr, key_padding_ptr, bias_ptr, seed_ptr,
    dout_strides, q_strides, k_strides, v_strides, out_strides, key_padding_strides, bias_strides, num_heads,
    num_queries, num_keys, scale, offset, threshold, kept_scale,
    CAUSAL: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):
    bh, b, h, first = query_block(num_heads, num_queries, CAUSAL, QUERIES)
    i = first + tl.arange(0, QUERIES)

    k_base = head(k_ptr, b, h // GROUP, k_strides)
    v_base = head(v_ptr, b, h // GROUP, v_strides)
    q_base = head(q_ptr, b, h, q_strides)
    dout_base = head(dout_ptr, b, h, dout_strides)
    q = load_rows(q_base, first, q_strides[2], num_queries, D, QUERIES, BLOCK_D)
    dout = load_rows(dout_base, first, dout_strides[2], num_queries, D, QUERIES, BLOCK_D)
    out = load_rows(head(out_ptr, b, h, out_strides), first, out_strides[2], num_queries, D, QUERIES, BLOCK_D)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + bh * num_queries + i, delta, mask=i < num_queries)
    lse = tl.load(lse_ptr + bh * num_queries + i, mask=i < num_queries, other=float("inf"))

    dq = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    whole, last = key_ranges(first, num_keys, CAUSAL, QUERIES, KEYS)
    for EDGE in tl.static_range(2):  # blocks that every query sees whole, then those that it may not
        for start in range(whole if EDGE else 0, last if EDGE else whole, KEYS):
            j = start + tl.arange(0, KEYS)
            k = load_rows(k_base, start, k_strides[2], num_keys, D, KEYS, BLOCK_D)
            scores = masked(
                dot(q, tl.trans(k), None) * (scale * LOG2E), b, h, i[:, None], j[None, :], num_queries, num_keys,
                key_padding_ptr, key_padding_strides, bias_ptr, bias_strides, CAUSAL and EDGE, EDGE,
                HAS_PADDING, HAS_BIAS,
            )
            weights = tl.exp2(scores - lse[:, None])
            v = load_rows(v_base, start, v_strides[2], num_keys, D, KEYS, BLOCK_D)
            dweights = dot(dout, tl.trans(v), None)
            if DROPOUT:
                kept = keep(tl.load(seed_ptr), offset, bh * num_queries + i, start, threshold, KEYS)
                dweights = tl.where(kept, dweights * kept_scale, 0.0)
            dscores = weights * (dweights - delta[:, None])
            dq = dot(dscores.to(k.dtype), k, dq)

    store_rows(dq_ptr, dq * scale, b, h, i, num_heads, num_queries, D, BLOCK_D)


@jit(do_not_specialize=COUNTS)
def _keys_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, key_padding_ptr, bias_ptr, seed_ptr,
    dout_strides, q_strides, k_strides, v_strides, key_padding_strides, bias_strides, num_heads, num_queries,
    num_keys, scale, offset, threshold, kept_scale,
    CAUSAL: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):
    num_blocks = tl.cdiv(num_keys, KEYS)
    bg = (tl.program_id(0) // num_blocks).to(tl.int64)
    key_heads = num_heads // GROUP
    b = bg // key_heads
    first = tl.program_id(0) % num_blocks * KEYS  # with CAUSAL the longest come first
    j = first + tl.arange(0, KEYS)

    k_base = head(k_ptr, b, bg % key_heads, k_strides)
    v_base = head(v_ptr, b, bg % key_heads, v_strides)
    k = load_rows(k_base, first, k_strides[2], num_keys, D, KEYS, BLOCK_D)
    v = load_rows(v_base, first, v_strides[2], num_keys, D, KEYS, BLOCK_D)
    dk = tl.zeros([KEYS, BLOCK_D], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_D], tl.float32)
    # With CAUSAL every block is masked: separate loops for the diagonal and the rest need too many registers.
    start_at = first // QUERIES * QUERIES if CAUSAL else 0
    for member in range(GROUP):
        h = bg % key_heads * GROUP + member
        q_base = head(q_ptr, b, h, q_strides)
        dout_base = head(dout_ptr, b, h, dout_strides)
        rows = (b * num_heads + h) * num_queries
        for start in range(start_at, num_queries, QUERIES):
            i = start + tl.arange(0, QUERIES)
            q = load_rows(q_base, start, q_strides[2], num_queries, D, QUERIES, BLOCK_D)
            scores = masked(
                dot(k, tl.trans(q), None) * (scale * LOG2E), b, h, i[None, :], j[:, None], num_queries, num_keys,
                key_padding_ptr, key_padding_strides, bias_ptr, bias_strides, CAUSAL, False, HAS_PADDING, HAS_BIAS,
            )
            lse = tl.load(lse_ptr + rows + i, mask=i < num_queries, other=float("inf"))  # so that weights are 0
            weights = tl.exp2(scores - lse[None, :])
            dout = load_rows(dout_base, start, dout_strides[2], num_queries, D, QUERIES, BLOCK_D)
            dweights = dot(v, tl.trans(dout), None)
            dropped = weights
            if DROPOUT:
                kept = tl.trans(keep(tl.load(seed_ptr), offset, rows + i, first, threshold, KEYS))
                dropped = tl.where(kept, weights, 0.0)
                dweights = tl.where(kept, dweights * kept_scale, 0.0)
            dv = dot(dropped.to(dout.dtype), dout, dv)
            delta = tl.load(delta_ptr + rows + i, mask=i < num_queries, other=0.0)
            dscores = weights * (dweights - delta[None, :])
            dk = dot(dscores.to(q.dtype), q, dk)

    store_rows(dk_ptr, dk * scale, b, bg % key_heads, j, key_heads, num_keys, D, BLOCK_D)
    store_rows(dv_ptr, dv * kept_scale, b, bg % key_heads, j, key_heads, num_keys, D, BLOCK_D)


@operator("flash_attention_backward")
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, bias: Tensor | None,
    seed: Tensor | None, out: Tensor, lse: Tensor, causal: bool, scale: float, p: float, offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv."""
    dq, dk, dv, delta, d = empty_rows(q), empty_rows(k), empty_rows(v), torch.empty_like(lse), q.shape[3]
    dout, q, k, v, out = in_vectors(dout), in_vectors(q), in_vectors(k), in_vectors(v), in_vectors(out)
    both = options(q, k, v, d, key_padding, bias, seed, causal, scale, p, offset) | {"dout_strides": strides(dout)}
    row = kind(q, bias, p)
    with on(q):
        if q.numel():
            meta = OVER_QUERIES[row]
            _queries_kernel[(q.shape[0] * q.shape[1] * cdiv(q.shape[2], meta["QUERIES"]),)](
                dout, q, k, v, out, lse, delta, dq, out_strides=strides(out), **both, **meta
            )
        if k.numel():
            meta = OVER_KEYS[row]
            _keys_kernel[(k.shape[0] * k.shape[1] * cdiv(k.shape[2], meta["KEYS"]),)](
                dout, q, k, v, lse, delta, dk, dv, **both, **meta
            )
    return dq, dk, dv


@backward.register_fake
def _(dout, q, k, v, key_padding, bias, seed, out, lse, causal, scale, p, offset) -> tuple[Tensor, Tensor, Tensor]:
    return empty_rows(q), empty_rows(k), empty_rows(v)
