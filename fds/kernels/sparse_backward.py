"""The gradients of `sparse_attention` over listed blocks: the scores are computed again, with lse.

The formulas are those of fds.kernels.flash_backward. One kernel, over blocks of queries, computes delta and dq by the
columns that a row lists; the next, over blocks of keys, dk and dv by the rows that list a column. No sum is shared
between programs, so results are deterministic.
"""

from __future__ import annotations

from torch import Tensor

from fds.kernels.flash_blocks import (
    LOG2E,
    biased,
    blocks,
    dot,
    empty_numbers,
    empty_rows,
    in_vectors,
    load_numbers,
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
    by_column,
    by_distance,
    by_row,
    fitted,
    is_chosen,
    kind,
    listed_range,
    listed_start,
    shared,
)

# As fds.kernels.sparse_forward.LAUNCH. Of the kernel over queries ...
OVER_QUERIES = {
    (64, 2): {99: blocks(64, 64, 4, 2)},
    (128, 2): {99: blocks(32, 32, 4, 2)},
    (256, 2): {99: blocks(32, 32, 8, 2)},
    (64, 4): {99: blocks(16, 32, 4, 2)},
    (128, 4): {99: blocks(16, 16, 8, 1)},
}
# ... and of the kernel over keys.
OVER_KEYS = {
    (64, 2): {99: blocks(32, 64, 4, 2)},
    (128, 2): {99: blocks(32, 32, 4, 2)},
    (256, 2): {99: blocks(16, 32, 8, 1)},
    (64, 4): {99: blocks(16, 16, 4, 1)},
    (128, 4): {99: blocks(16, 16, 8, 1)},
}


@jit(do_not_specialize=COUNTS)
def _queries_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, delta_ptr, dq_ptr, lists_ptr, starts_ptr, columns_ptr, chosen_ptr,
    key_padding_ptr, bias_ptr, relative_ptr, seed_ptr, query_documents_ptr, key_documents_ptr, dout_strides, q_strides,
    k_strides, v_strides, out_strides, key_padding_strides, bias_strides, relative_strides, query_documents_strides,
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
    dout = load_rows(dout_ptr, b, h, first, dout_strides, num_queries, D, QUERIES, BLOCK_D)
    out = load_rows(out_ptr, b, h, first, out_strides, num_queries, D, QUERIES, BLOCK_D)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    store_numbers(delta_ptr, delta, bh, i, num_queries)
    lse = load_numbers(lse_ptr, b, h, first, num_heads, num_queries, QUERIES, False)
    lse = tl.where(i < num_queries, lse, float("inf"))
    dq = tl.zeros([QUERIES, BLOCK_D], tl.float32)
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
        weights = masked(
            tl.exp2(scores - lse[:, None]), 0.0, b, i[:, None], j[None, :], num_queries, num_keys, key_padding_ptr,
            key_padding_strides, query_documents_ptr, query_documents_strides, key_documents_ptr,
            key_documents_strides, CAUSAL, True, HAS_PADDING, HAS_DOCUMENTS,
        )
        if MOST:
            seen = is_chosen(chosen_ptr, bh, i, start // BLOCK, num_queries, MOST, TOGETHER)
            weights = tl.where(seen[:, None], weights, 0.0)
        v = load_rows(v_ptr, b, h // GROUP, start, v_strides, num_keys, D, KEYS, BLOCK_D)
        dweights = dot(dout, tl.trans(v), None)
        if DROPOUT:
            kept = keep(tl.load(seed_ptr), offset, bh * num_queries + i, start, threshold, KEYS)
            dweights = tl.where(kept, dweights * kept_scale, 0.0)
        dscores = weights * (dweights - delta[:, None])
        dq = dot(dscores.to(k.dtype), k, dq)
    store_rows(dq_ptr, dq * scale, b, h, i, num_heads, num_queries, D, BLOCK_D)


@jit(do_not_specialize=COUNTS)
def _keys_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, lists_ptr, starts_ptr, rows_ptr, chosen_ptr,
    key_padding_ptr, bias_ptr, relative_ptr, seed_ptr, query_documents_ptr, key_documents_ptr, dout_strides, q_strides,
    k_strides, v_strides, key_padding_strides, bias_strides, relative_strides, query_documents_strides,
    key_documents_strides, num_heads, num_queries, num_keys, num_blocks, num_lists, scale, offset, threshold,
    kept_scale,
    CAUSAL: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, BIAS: tl.constexpr,
    RELATIVE: tl.constexpr, DROPOUT: tl.constexpr, MOST: tl.constexpr, TOGETHER: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    TMA: tl.constexpr,
):
    PARTS: tl.constexpr = BLOCK // QUERIES
    num_tiles = tl.cdiv(num_keys, KEYS)
    bg = (tl.program_id(0) // num_tiles).to(tl.int64)
    key_heads = num_heads // GROUP
    b = bg // key_heads
    g = bg % key_heads
    first = tl.program_id(0) % num_tiles * KEYS
    j = first + tl.arange(0, KEYS)

    k = load_rows(k_ptr, b, g, first, k_strides, num_keys, D, KEYS, BLOCK_D)
    v = load_rows(v_ptr, b, g, first, v_strides, num_keys, D, KEYS, BLOCK_D)
    dk = tl.zeros([KEYS, BLOCK_D], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_D], tl.float32)
    for member in range(GROUP):
        h = g * GROUP + member
        bh = b * num_heads + h
        begin, end = listed_range(lists_ptr, starts_ptr, bh % num_lists, first // BLOCK, num_blocks, PARTS)
        for part in range(begin, end):
            start = listed_start(rows_ptr, part, BLOCK, PARTS, QUERIES)
            i = start + tl.arange(0, QUERIES)
            q = load_rows(q_ptr, b, h, start, q_strides, num_queries, D, QUERIES, BLOCK_D)
            scores = dot(k, tl.trans(q), None) * (scale * LOG2E)
            if BIAS != "":
                scores = biased(
                    scores, b, h, i[None, :], j[:, None], num_queries, num_keys, bias_ptr, bias_strides, BIAS
                )
            if RELATIVE:
                scores = by_distance(
                    scores, h, i[None, :], j[:, None], num_queries, num_keys, relative_ptr, relative_strides
                )
            lse = load_numbers(lse_ptr, b, h, start, num_heads, num_queries, QUERIES, False)
            lse = tl.where(i < num_queries, lse, float("inf"))
            delta = load_numbers(delta_ptr, b, h, start, num_heads, num_queries, QUERIES, False)
            dout = load_rows(dout_ptr, b, h, start, dout_strides, num_queries, D, QUERIES, BLOCK_D)
            weights = masked(
                tl.exp2(scores - lse[None, :]), 0.0, b, i[None, :], j[:, None], num_queries, num_keys,
                key_padding_ptr, key_padding_strides, query_documents_ptr, query_documents_strides,
                key_documents_ptr, key_documents_strides, CAUSAL, False, HAS_PADDING, HAS_DOCUMENTS,
            )
            if MOST:
                seen = is_chosen(chosen_ptr, bh, i, first // BLOCK, num_queries, MOST, TOGETHER)
                weights = tl.where(seen[None, :], weights, 0.0)
            dropped = weights
            if DROPOUT:
                kept = tl.trans(keep(tl.load(seed_ptr), offset, bh * num_queries + i, first, threshold, KEYS))
                dropped = tl.where(kept, weights, 0.0)
            dv = dot(dropped.to(dout.dtype), dout, dv)
            dweights = dot(v, tl.trans(dout), None)
            if DROPOUT:
                dweights = tl.where(kept, dweights * kept_scale, 0.0)
            dscores = weights * (dweights - delta[None, :])
            dk = dot(dscores.to(q.dtype), q, dk)
    store_rows(dk_ptr, dk * scale, b, g, j, key_heads, num_keys, D, BLOCK_D)
    store_rows(dv_ptr, dv * kept_scale, b, g, j, key_heads, num_keys, D, BLOCK_D)


@operator("sparse_attention_backward", lambda dout, q, k, v, *_: (empty_rows(q), empty_rows(k), empty_rows(v)))
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, bias: Tensor | None,
    relative_bias: Tensor | None, seed: Tensor | None, documents: Tensor | None, chosen: Tensor | None, out: Tensor,
    lse: Tensor, layout: int, block: int, together: int, causal: bool, scale: float, p: float, offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv."""
    dq, dk, dv, delta, d = empty_rows(q), empty_rows(k), empty_rows(v), empty_numbers(q), q.shape[3]
    lists, starts, columns = by_row(q, chosen, layout, block, together, causal)
    if not columns.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    dout, q, k, v, out = in_vectors(dout), in_vectors(q), in_vectors(k), in_vectors(v), in_vectors(out)
    both = shared(
        q, k, d, key_padding, bias, relative_bias, seed, documents, chosen, lists, block, together, causal, scale, p,
        offset,
    )
    with on(q):
        row = fitted(fitting(OVER_QUERIES[kind(q)], q.device), block)
        _queries_kernel[(q.shape[0] * q.shape[1] * cdiv(q.shape[2], row["QUERIES"]),)](
            lse_ptr=lse, delta_ptr=delta, dq_ptr=dq, lists_ptr=lists, starts_ptr=starts, columns_ptr=columns,
            **operands(row, "dout q out", dout=dout, q=q, k=k, v=v, out=out), **both, **row,
        )
        row = fitted(fitting(OVER_KEYS[kind(q)], q.device), block)
        lists, starts, rows = by_column(q, chosen, layout, block, together, causal)
        _keys_kernel[(k.shape[0] * k.shape[1] * cdiv(k.shape[2], row["KEYS"]),)](
            lse_ptr=lse, delta_ptr=delta, dk_ptr=dk, dv_ptr=dv, lists_ptr=lists, starts_ptr=starts, rows_ptr=rows,
            **operands(row, "dout q", dout=dout, q=q, k=k, v=v), **both, **row,
        )
    return dq, dk, dv
