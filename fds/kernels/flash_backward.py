"""The gradients of `flash_attention` by blocks: the scores are computed again, with lse, and never stored.

With dout the gradient of out, p and keep as in fds.kernels.flash, and c = 1 / (1 - ratio)::

    delta_i = sum_d dout_id out_id              dv = (p * keep * c)^T dout
    ds = p * (keep * c * dout v^T - delta)      dq = scale * ds k        dk = scale * ds^T q

Two kernels: one over blocks of queries computes delta and dq, the next, over blocks of keys, dk and dv. No sum is
shared between programs, so results are deterministic.
Moves: q, k, v, out, dout, dq, dk, dv and again k and v for each block of queries, q and dout for each block of keys
(mostly from the L2 cache); delta (B, H, Sq) float32 between the two.

Source: Dao et al. 2022, arXiv:2205.14135, algorithm 4; Dao 2023, arXiv:2307.08691, algorithm 2.
"""

from __future__ import annotations

from torch import Tensor

from fds.kernels.flash_blocks import (
    COUNTS,
    LOG2E,
    biased,
    blocks,
    dot,
    empty_numbers,
    empty_rows,
    in_vectors,
    key_ranges,
    kind,
    load_numbers,
    load_rows,
    masked,
    numbers,
    operands,
    options,
    query_block,
    store_numbers,
    store_rows,
)
from fds.kernels.language import cdiv, fitting, jit, on, tl
from fds.kernels.operators import operator
from fds.kernels.philox import keep

# As fds.kernels.flash.LAUNCH, derived, not measured. Of the kernel over queries ...
OVER_QUERIES = {
    (64, 2, ""): {227: blocks(128, 128, 8, 2, tma=True), 99: blocks(128, 64, 8, 2)},
    (64, 2, "masked"): {227: blocks(128, 64, 8, 2, tma=True), 99: blocks(128, 32, 8, 2)},
    (64, 2, "bias"): {227: blocks(128, 64, 8, 2, tma=True), 99: blocks(128, 32, 8, 2)},
    (128, 2, ""): {227: blocks(128, 64, 8, 2, tma=True), 99: blocks(128, 64, 8, 2)},
    (128, 2, "masked"): {227: blocks(128, 64, 8, 2, tma=True), 99: blocks(128, 32, 8, 2)},
    (128, 2, "bias"): {227: blocks(128, 32, 8, 2, tma=True), 99: blocks(128, 32, 8, 2)},
    (256, 2, ""): {227: blocks(64, 64, 8, 2, tma=True), 99: blocks(64, 32, 8, 1)},
    (256, 2, "masked"): {227: blocks(64, 32, 8, 2, tma=True), 99: blocks(32, 32, 8, 2)},
    (256, 2, "bias"): {227: blocks(64, 32, 8, 2, tma=True), 99: blocks(32, 32, 8, 2)},
    (64, 4, ""): {99: blocks(32, 32, 8, 2)},
    (64, 4, "masked"): {99: blocks(16, 32, 8, 2)},
    (64, 4, "bias"): {99: blocks(16, 32, 8, 2)},
    (128, 4, ""): {99: blocks(16, 32, 8, 2)},
    (128, 4, "masked"): {99: blocks(16, 32, 8, 1)},
    (128, 4, "bias"): {99: blocks(16, 32, 8, 1)},
}
# ... and of the kernel over keys, which holds two blocks of sums in registers instead of one.
OVER_KEYS = {
    (64, 2, ""): {227: blocks(64, 128, 8, 2, tma=True), 99: blocks(64, 128, 8, 2)},
    (64, 2, "masked"): {227: blocks(64, 128, 8, 2, tma=True), 99: blocks(32, 128, 8, 2)},
    (64, 2, "bias"): {227: blocks(64, 128, 8, 2, tma=True), 99: blocks(32, 128, 8, 2)},
    (128, 2, ""): {227: blocks(64, 128, 8, 2, tma=True), 99: blocks(32, 128, 8, 2)},
    (128, 2, "masked"): {227: blocks(32, 128, 8, 2, tma=True), 99: blocks(16, 64, 8, 2)},
    (128, 2, "bias"): {227: blocks(32, 128, 8, 2, tma=True), 99: blocks(16, 64, 8, 2)},
    (256, 2, ""): {227: blocks(64, 64, 8, 2, tma=True), 99: blocks(32, 32, 8, 2)},
    (256, 2, "masked"): {227: blocks(32, 64, 8, 2, tma=True), 99: blocks(32, 32, 8, 2)},
    (256, 2, "bias"): {227: blocks(32, 64, 8, 2, tma=True), 99: blocks(32, 32, 8, 2)},
    (64, 4, ""): {99: blocks(32, 16, 4, 1)},
    (64, 4, "masked"): {99: blocks(32, 16, 4, 2)},
    (64, 4, "bias"): {99: blocks(32, 16, 4, 2)},
    (128, 4, ""): {99: blocks(16, 16, 8, 1)},
    (128, 4, "masked"): {99: blocks(16, 16, 8, 1)},
    (128, 4, "bias"): {99: blocks(16, 16, 8, 1)},
}


@jit(do_not_specialize=COUNTS)
def _queries_kernel(
    dout_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, delta_ptr, dq_ptr, key_padding_ptr, bias_ptr, seed_ptr,
    query_documents_ptr, key_documents_ptr, dout_strides, q_strides, k_strides, v_strides, out_strides,
    key_padding_strides, bias_strides, query_documents_strides, key_documents_strides, num_heads, num_queries,
    num_keys, scale, offset, threshold, kept_scale,
    CAUSAL: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, TMA: tl.constexpr,
):
    bh, b, h, first = query_block(num_heads, num_queries, CAUSAL, QUERIES)
    i = first + tl.arange(0, QUERIES)

    q = load_rows(q_ptr, b, h, first, q_strides, num_queries, D, QUERIES, BLOCK_D)
    dout = load_rows(dout_ptr, b, h, first, dout_strides, num_queries, D, QUERIES, BLOCK_D)
    out = load_rows(out_ptr, b, h, first, out_strides, num_queries, D, QUERIES, BLOCK_D)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    store_numbers(delta_ptr, delta, bh, i, num_queries)
    lse = load_numbers(lse_ptr, b, h, first, num_heads, num_queries, QUERIES, False)
    if BIAS != "":  # queries beyond the last have scores of their own, and no numbers to take from them
        lse = tl.where(i < num_queries, lse, float("inf"))

    dq = tl.zeros([QUERIES, BLOCK_D], tl.float32)
    whole, last = key_ranges(first, num_keys, CAUSAL, QUERIES, KEYS)
    for EDGE in tl.static_range(2):  # blocks that every query sees whole, then those that it may not
        for start in range(whole if EDGE else 0, last if EDGE else whole, KEYS):
            j = start + tl.arange(0, KEYS)
            k = load_rows(k_ptr, b, h // GROUP, start, k_strides, num_keys, D, KEYS, BLOCK_D)
            scores = dot(q, tl.trans(k), None) * (scale * LOG2E)
            if BIAS != "":
                scores = biased(
                    scores, b, h, i[:, None], j[None, :], num_queries, num_keys, bias_ptr, bias_strides, BIAS
                )
            weights = masked(
                tl.exp2(scores - lse[:, None]), 0.0, b, i[:, None], j[None, :], num_queries, num_keys,
                key_padding_ptr, key_padding_strides, query_documents_ptr, query_documents_strides, key_documents_ptr,
                key_documents_strides, CAUSAL and EDGE, EDGE, HAS_PADDING, HAS_DOCUMENTS,
            )
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
    dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, key_padding_ptr, bias_ptr, seed_ptr,
    query_documents_ptr, key_documents_ptr, dout_strides, q_strides, k_strides, v_strides, key_padding_strides,
    bias_strides, query_documents_strides, key_documents_strides, num_heads, num_queries, num_keys, scale, offset,
    threshold, kept_scale,
    CAUSAL: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, BIAS: tl.constexpr,
    DROPOUT: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, TMA: tl.constexpr,
):
    num_blocks = tl.cdiv(num_keys, KEYS)
    bg = (tl.program_id(0) // num_blocks).to(tl.int64)
    key_heads = num_heads // GROUP
    b = bg // key_heads
    first = tl.program_id(0) % num_blocks * KEYS  # with CAUSAL the longest come first
    j = first + tl.arange(0, KEYS)

    k = load_rows(k_ptr, b, bg % key_heads, first, k_strides, num_keys, D, KEYS, BLOCK_D)
    v = load_rows(v_ptr, b, bg % key_heads, first, v_strides, num_keys, D, KEYS, BLOCK_D)
    dk = tl.zeros([KEYS, BLOCK_D], tl.float32)
    dv = tl.zeros([KEYS, BLOCK_D], tl.float32)
    start_at = first // QUERIES * QUERIES if CAUSAL else 0
    # At least one block, of zeros if need be: a branch around the loop makes ptxas run its products one after another.
    stop_at = tl.maximum(num_queries, start_at + 1)
    tl.assume(stop_at > start_at)
    for member in range(GROUP):
        h = bg % key_heads * GROUP + member
        rows = (b * num_heads + h) * num_queries
        for start in range(start_at, stop_at, QUERIES):
            i = start + tl.arange(0, QUERIES)
            q = load_rows(q_ptr, b, h, start, q_strides, num_queries, D, QUERIES, BLOCK_D)
            scores = dot(k, tl.trans(q), None) * (scale * LOG2E)
            if BIAS != "":
                scores = biased(
                    scores, b, h, i[None, :], j[:, None], num_queries, num_keys, bias_ptr, bias_strides, BIAS
                )
            lse = load_numbers(lse_ptr, b, h, start, num_heads, num_queries, QUERIES, TMA)
            if BIAS != "":  # as above
                lse = tl.where(i < num_queries, lse, float("inf"))
            delta = load_numbers(delta_ptr, b, h, start, num_heads, num_queries, QUERIES, TMA)
            dout = load_rows(dout_ptr, b, h, start, dout_strides, num_queries, D, QUERIES, BLOCK_D)
            weights = masked(
                tl.exp2(scores - lse[None, :]), 0.0, b, i[None, :], j[:, None], num_queries, num_keys,
                key_padding_ptr, key_padding_strides, query_documents_ptr, query_documents_strides, key_documents_ptr,
                key_documents_strides, CAUSAL and BLOCK_D > 128, False, HAS_PADDING, HAS_DOCUMENTS,
            )
            if CAUSAL and BLOCK_D <= 128:  # noqa: SIM102  (known to the compiler, as the next is not)
                # On the diagonal only: with a loop of its own, or wider heads, it would need too many registers.
                if start < first + KEYS:
                    weights = tl.where(i[None, :] >= j[:, None], weights, 0.0)
            dropped = weights
            if DROPOUT:
                kept = tl.trans(keep(tl.load(seed_ptr), offset, rows + i, first, threshold, KEYS))
                dropped = tl.where(kept, weights, 0.0)
            dv = dot(dropped.to(dout.dtype), dout, dv)
            dweights = dot(v, tl.trans(dout), None)
            if DROPOUT:
                dweights = tl.where(kept, dweights * kept_scale, 0.0)
            dscores = weights * (dweights - delta[None, :])
            dk = dot(dscores.to(q.dtype), q, dk)

    store_rows(dk_ptr, dk * scale, b, bg % key_heads, j, key_heads, num_keys, D, BLOCK_D)
    store_rows(dv_ptr, dv * kept_scale, b, bg % key_heads, j, key_heads, num_keys, D, BLOCK_D)


@operator("flash_attention_backward", lambda dout, q, k, v, *_: (empty_rows(q), empty_rows(k), empty_rows(v)))
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, bias: Tensor | None,
    seed: Tensor | None, query_documents: Tensor | None, key_documents: Tensor | None, out: Tensor, lse: Tensor,
    causal: bool, scale: float, p: float, offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv."""
    dq, dk, dv, delta, d = empty_rows(q), empty_rows(k), empty_rows(v), empty_numbers(q), q.shape[3]
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    dout, q, k, v, out = in_vectors(dout), in_vectors(q), in_vectors(k), in_vectors(v), in_vectors(out)
    both = options(q, k, d, key_padding, bias, seed, query_documents, key_documents, causal, scale, p, offset)
    key = kind(q, key_padding, bias, query_documents, p)
    with on(q):
        row = fitting(OVER_QUERIES[key], q.device)
        _queries_kernel[(q.shape[0] * q.shape[1] * cdiv(q.shape[2], row["QUERIES"]),)](
            lse_ptr=lse, delta_ptr=delta, dq_ptr=dq,
            **operands(row, "dout q out", dout=dout, q=q, k=k, v=v, out=out), **both, **row,
        )
        row = fitting(OVER_KEYS[key], q.device)
        _keys_kernel[(k.shape[0] * k.shape[1] * cdiv(k.shape[2], row["KEYS"]),)](
            lse_ptr=numbers(row, lse), delta_ptr=numbers(row, delta), dk_ptr=dk, dv_ptr=dv,
            **operands(row, "dout q", dout=dout, q=q, k=k, v=v), **both, **row,
        )
    return dq, dk, dv
