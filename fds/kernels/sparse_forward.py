"""The forward kernel of `sparse_attention`: a program for a block of queries, over the blocks of keys that it lists.

With the notation of fds.kernels.flash, the softmax in one pass over listed blocks. Moves: q and out once, k and v once
for each block that is listed; the lists of indices; lse (B, H, S) float32 in base 2.
"""

from __future__ import annotations

import math

from torch import Tensor

from fds.kernels.flash_blocks import (
    LOG2E,
    biased,
    blocks,
    dot,
    empty_numbers,
    empty_rows,
    in_vectors,
    load_rows,
    masked,
    operands,
    store_numbers,
    store_rows,
)
from fds.kernels.language import cdiv, fitting, jit, on, tl
from fds.kernels.operators import operator
from fds.kernels.philox import keep
from fds.kernels.sparse_lists import (
    COUNTS,
    by_distance,
    by_row,
    fitted,
    is_chosen,
    kind,
    listed_range,
    listed_start,
    shared,
)

# By (columns, bytes per element) and KiB of shared memory: queries and keys at once, as far as a block has as many.
# Derived, not measured: the largest that spill no registers on sm_90.
LAUNCH = {
    (64, 2): {99: blocks(64, 64, 4, 2)},
    (128, 2): {99: blocks(64, 32, 8, 2)},
    (256, 2): {99: blocks(32, 32, 8, 2)},
    (64, 4): {99: blocks(32, 32, 4, 2)},
    (128, 4): {99: blocks(16, 32, 4, 2)},
}


@jit(do_not_specialize=COUNTS)
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, lists_ptr, starts_ptr, columns_ptr, chosen_ptr, key_padding_ptr, bias_ptr,
    relative_ptr, seed_ptr, query_documents_ptr, key_documents_ptr,
    q_strides, k_strides, v_strides, key_padding_strides, bias_strides, relative_strides, query_documents_strides,
    key_documents_strides, num_heads, num_queries, num_keys, num_blocks, num_lists, scale, offset, threshold,
    kept_scale,
    CAUSAL: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, BIAS: tl.constexpr,
    RELATIVE: tl.constexpr, DROPOUT: tl.constexpr, MOST: tl.constexpr, TOGETHER: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    TMA: tl.constexpr,
):
    PARTS: tl.constexpr = BLOCK // KEYS
    num_tiles = tl.cdiv(num_queries, QUERIES)
    bh = (tl.program_id(0) // num_tiles).to(tl.int64)
    b = bh // num_heads
    h = bh % num_heads
    first = tl.program_id(0) % num_tiles * QUERIES
    i = first + tl.arange(0, QUERIES)
    begin, end = listed_range(lists_ptr, starts_ptr, bh % num_lists, first // BLOCK, num_blocks, PARTS)

    q = load_rows(q_ptr, b, h, first, q_strides, num_queries, D, QUERIES, BLOCK_D)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    for part in range(begin, end):
        start = listed_start(columns_ptr, part, BLOCK, PARTS, KEYS)
        j = start + tl.arange(0, KEYS)
        k = load_rows(k_ptr, b, h // GROUP, start, k_strides, num_keys, D, KEYS, BLOCK_D)
        scores = dot(q, tl.trans(k), None) * (scale * LOG2E)
        if BIAS != "":
            scores = biased(
                scores, b, h, i[:, None], j[None, :], num_queries, num_keys, bias_ptr, bias_strides, BIAS
            )
        if RELATIVE:
            scores = by_distance(
                scores, h, i[:, None], j[None, :], num_queries, num_keys, relative_ptr, relative_strides
            )
        scores = masked(
            scores, float("-inf"), b, i[:, None], j[None, :], num_queries, num_keys, key_padding_ptr,
            key_padding_strides, query_documents_ptr, query_documents_strides, key_documents_ptr,
            key_documents_strides, CAUSAL, True, HAS_PADDING, HAS_DOCUMENTS,
        )
        if MOST:
            seen = is_chosen(chosen_ptr, bh, i, start // BLOCK, num_queries, MOST, TOGETHER)
            scores = tl.where(seen[:, None], scores, float("-inf"))
        now = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(now == float("-inf"), 0.0, now)  # no key yet
        shrink = tl.exp2(highest - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if DROPOUT:
            kept = keep(tl.load(seed_ptr), offset, bh * num_queries + i, start, threshold, KEYS)
            weights = tl.where(kept, weights, 0.0)
        v = load_rows(v_ptr, b, h // GROUP, start, v_strides, num_keys, D, KEYS, BLOCK_D)
        sums = dot(weights.to(v.dtype), v, sums * shrink[:, None])
        highest = now

    has_keys = total != 0
    total = tl.where(has_keys, total, 1.0)
    lse = tl.where(has_keys, highest + tl.log2(total), float("inf"))  # inf: weights of 0 in backward
    store_numbers(lse_ptr, lse, bh, i, num_queries)
    store_rows(out_ptr, sums * (kept_scale / total)[:, None], b, h, i, num_heads, num_queries, D, BLOCK_D)


@operator("sparse_attention", lambda q, *_: (empty_rows(q), empty_numbers(q)))
def forward(
    q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, bias: Tensor | None, relative_bias: Tensor | None,
    seed: Tensor | None, documents: Tensor | None, chosen: Tensor | None, layout: int, block: int, together: int,
    causal: bool, scale: float, p: float, offset: int,
) -> tuple[Tensor, Tensor]:
    """Return out, and lse in base 2."""
    out, lse, d = empty_rows(q), empty_numbers(q), q.shape[3]
    lists, starts, columns = by_row(q, chosen, layout, block, together, causal)
    if not columns.numel():
        return out.zero_(), lse.fill_(math.inf)
    q, k, v = in_vectors(q), in_vectors(k), in_vectors(v)
    row = fitted(fitting(LAUNCH[kind(q)], q.device), block)
    with on(q):
        _forward_kernel[(q.shape[0] * q.shape[1] * cdiv(q.shape[2], row["QUERIES"]),)](
            out_ptr=out, lse_ptr=lse, lists_ptr=lists, starts_ptr=starts, columns_ptr=columns,
            **operands(row, "q", q=q, k=k, v=v),
            **shared(
                q, k, d, key_padding, bias, relative_bias, seed, documents, chosen, lists, block, together, causal,
                scale, p, offset,
            ),
            **row,
        )
    return out, lse
