"""What the kernels of attention share: loading, masking and storing blocks, and the arguments of a launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fds.kernels.language import cdiv, is_interpreted, jit, next_power_of_2, tl
from fds.kernels.philox import threshold

INTERPRETED = tl.constexpr(is_interpreted) if tl else None
# A bias below this masks: bias_block to it in float32, a row's other terms would be lost to rounding in lse.
LEAST_BIAS = -1e30
UNSEEN = tl.constexpr(LEAST_BIAS) if tl else None
LOG2E = tl.constexpr(1.4426950408889634) if tl else None
FAR = 2**22  # stride of rows up to which 32-bit offsets suffice within a block of 256


@jit
def load_rows(base, start, stride, count, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return rows start + arange(ROWS) of a matrix of `count` rows, (ROWS, BLOCK_D), zero outside.

    `stride` is in vectors of 16 bytes, of which a row is a multiple (see `in_vectors`).
    """
    VECTOR: tl.constexpr = 128 // base.dtype.element_ty.primitive_bitwidth
    stride = stride * VECTOR
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    at = base + tl.cast(start, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    inside = (start + rows < count)[:, None]
    WHOLE: tl.constexpr = (D + VECTOR - 1) // VECTOR * VECTOR
    if WHOLE < BLOCK_D:
        inside = inside & (columns < WHOLE)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@jit
def head(x, b, h, strides):
    """Return the address of the first row of a head, of a tensor (B, H, S, D) whose strides are in vectors."""
    return x + (b * strides[0] + h * strides[1]) * (128 // x.dtype.element_ty.primitive_bitwidth)


@jit
def store_rows(base, x, b, h, rows, num_heads, count, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store x (ROWS, BLOCK_D) in these rows of a head, of a tensor of `count` rows laid out by `empty_rows`."""
    columns = tl.arange(0, BLOCK_D)
    at = ((b * count + rows) * num_heads + h)[:, None] * D + columns[None, :]
    inside = (rows < count)[:, None] & (columns < D)[None, :]
    tl.store(base + at, x.to(base.dtype.element_ty), mask=inside)


@jit
def query_block(num_heads, num_queries, CAUSAL: tl.constexpr, QUERIES: tl.constexpr):
    """Return which queries are this program's: (b * H + h, b, h, the first query)."""
    num_blocks = tl.cdiv(num_queries, QUERIES)
    bh = (tl.program_id(0) // num_blocks).to(tl.int64)
    first = tl.program_id(0) % num_blocks * QUERIES
    if CAUSAL:  # the longest first, so that none is left for the end
        first = (num_blocks - 1) * QUERIES - first
    return bh, bh // num_heads, bh % num_heads, first


@jit
def key_ranges(first, num_keys, CAUSAL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """Return the ends of the keys that a block of queries sees whole, in whole blocks, and of those that it sees."""
    last = num_keys
    whole = num_keys // KEYS * KEYS
    if CAUSAL:
        last = tl.minimum(num_keys, first + QUERIES)
        whole = tl.minimum(num_keys, first) // KEYS * KEYS
    return whole, last


@jit
def dot(a, b, c):
    """Return a b + c in float32 by tensor cores; a product of float32 is three of TF32."""
    if INTERPRETED:  # Triton's interpreter multiplies the bits of bfloat16 as integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, c, input_precision="tf32x3")


@jit
def masked(
    scores, b, h, i, j, num_queries, num_keys, key_padding_ptr, key_padding_strides, bias_ptr, bias_strides,
    CAUSAL: tl.constexpr, END: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_BIAS: tl.constexpr,
):
    """Return scores in base 2 with their bias, -inf where a query does not see a key.

    i and j are the indices of queries and keys, in shapes that broadcast to those of the scores, in either order.
    """
    if HAS_BIAS:
        bias = bias_ptr + b * bias_strides[0] + h * bias_strides[1]
        at = bias + i.to(tl.int64) * bias_strides[2] + j.to(tl.int64) * bias_strides[3]
        bias_block = tl.load(at, mask=(i < num_queries) & (j < num_keys), other=float("-inf")).to(tl.float32)
        scores += tl.where(bias_block < UNSEEN, float("-inf"), bias_block) * LOG2E
    if HAS_PADDING:
        key_padding = key_padding_ptr + b * key_padding_strides[0]
        real = tl.load(key_padding + j.to(tl.int64) * key_padding_strides[1], mask=j < num_keys, other=0)
        scores = tl.where(real != 0, scores, float("-inf"))
    if CAUSAL:
        scores = tl.where(i >= j, scores, float("-inf"))
    if END:
        scores = tl.where(j < num_keys, scores, float("-inf"))
    return scores


def in_vectors(x: Tensor) -> Tensor:
    """Return x (B, H, S, D) as the kernels read it: rows padded with zeros to vectors of 16 bytes, at most `FAR` apart.

    That is x itself where possible, else a copy: scalar loads would need too many registers.
    """
    n = 16 // x.element_size()
    is_whole = x.stride(3) == 1 and all(y % n == 0 for y in (x.shape[3], *x.stride()[:3])) and x.data_ptr() % 16 == 0
    if is_whole and x.stride(2) < FAR:
        return x
    padded = x.new_zeros(*x.shape[:3], cdiv(x.shape[3], n) * n)
    padded[..., : x.shape[3]] = x
    return padded


def strides(x: Tensor) -> tuple[int, int, int]:
    """Return strides over batch, heads and rows in vectors of 16 bytes, which tells the compiler their alignment."""
    return tuple(y * x.element_size() // 16 for y in x.stride()[:3])  # pyright: ignore[reportReturnType]  (three)


def empty_rows(x: Tensor) -> Tensor:
    """Return uninitialised memory for a tensor like x (B, H, S, D), laid out as (B, S, H, D), so that heads merge."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def options(
    q: Tensor, k: Tensor, v: Tensor, d: int, key_padding: Tensor | None, bias: Tensor | None, seed: Tensor | None,
    causal: bool, scale: float, p: float, offset: int,
) -> dict[str, Any]:
    """Return the arguments that all kernels of attention share, beside pointers; q, k and v come from `in_vectors`.

    `d` is the head dimension without padding.
    """
    if bias is not None:
        bias = bias.expand(*q.shape[:3], k.shape[2])
    return {
        "q_strides": strides(q), "k_strides": strides(k), "v_strides": strides(v),
        "num_heads": q.shape[1], "num_queries": q.shape[2], "num_keys": k.shape[2], "scale": scale,
        "GROUP": q.shape[1] // max(k.shape[1], 1), "D": d, "BLOCK_D": width(d),
        "key_padding_ptr": key_padding, "bias_ptr": bias, "seed_ptr": seed,
        "key_padding_strides": (0, 0) if key_padding is None else key_padding.stride(),
        "bias_strides": (0, 0, 0, 0) if bias is None else bias.stride(),
        "offset": offset, "threshold": threshold(p), "kept_scale": 1 / (1 - p),
        "CAUSAL": causal, "HAS_PADDING": key_padding is not None, "HAS_BIAS": bias is not None, "DROPOUT": p > 0,
    }


def width(d: int) -> int:
    """Return the columns of a block for rows of d: a power of two, at least 16, the minimum of tensor cores."""
    return max(16, next_power_of_2(d))


def blocks(queries: int, keys: int, num_warps: int, num_stages: int) -> dict[str, int]:
    """Return a row of a launch table."""
    return {"QUERIES": queries, "KEYS": keys, "num_warps": num_warps, "num_stages": num_stages}


def kind(q: Tensor, bias: Tensor | None, p: float) -> tuple[int, int, bool]:
    """Return the key of q's row in a launch table."""
    return max(width(q.shape[3]), 64), q.element_size(), bias is not None or p > 0


# Arguments whose values the compiler does not specialise on.
COUNTS = ["num_heads", "num_queries", "num_keys", "offset", "threshold"]
