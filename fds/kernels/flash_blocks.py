"""What the kernels of attention share: loading, masking and storing blocks, and the arguments of a launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fds.kernels.language import TensorDescriptor, cdiv, is_interpreted, jit, next_power_of_2, tl
from fds.kernels.philox import threshold

INTERPRETED = tl.constexpr(is_interpreted) if tl else None
# A bias below this masks: bias_block to it in float32, a row's other terms would be lost to rounding in lse.
LEAST_BIAS = -1e30
UNSEEN = tl.constexpr(LEAST_BIAS) if tl else None
LOG2E = tl.constexpr(1.4426950408889634) if tl else None
FAR = 2**22  # stride of rows up to which 32-bit offsets suffice within a block of 256


@jit
def load_rows(x, b, h, start, strides, count, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return rows start + arange(ROWS) of a head of x (B, H, count, D), (ROWS, BLOCK_D), zero outside.

    x is a pointer, with strides in vectors of 16 bytes, of which a row is a multiple (see `in_vectors`), or a
    descriptor (see `described`), by which Hopper's copy engine (TMA) loads the block.
    """
    if strides is None:
        return tl.reshape(x.load([b.to(tl.int32), h.to(tl.int32), start, 0]), [ROWS, BLOCK_D])
    else:  # noqa: RET505  (Triton would compile code after the if)
        VECTOR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
        stride = strides[2] * VECTOR
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK_D)
        base = x + (b * strides[0] + h * strides[1]) * VECTOR + tl.cast(start, tl.int64) * stride
        at = base + (rows[:, None] * stride + columns[None, :])
        inside = (start + rows < count)[:, None]
        WHOLE: tl.constexpr = (D + VECTOR - 1) // VECTOR * VECTOR
        if WHOLE < BLOCK_D:
            inside = inside & (columns < WHOLE)[None, :]
        return tl.load(at, mask=inside, other=0.0)


@jit
def store_rows(base, x, b, h, rows, num_heads, count, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store x (ROWS, BLOCK_D) in these rows of a head, of a tensor of `count` rows laid out by `empty_rows`."""
    columns = tl.arange(0, BLOCK_D)
    at = ((b * count + rows) * num_heads + h)[:, None] * D + columns[None, :]
    inside = (rows < count)[:, None] & (columns < D)[None, :]
    tl.store(base + at, x.to(base.dtype.element_ty), mask=inside)


@jit
def store_numbers(base, x, bh, i, count):
    """Store x, a float32 for each query i of a head, in memory from `empty_numbers`, padding included."""
    whole = (count + 3) // 4 * 4
    tl.store(base + bh * whole + i, x, mask=i < whole)


@jit
def load_numbers(x, b, h, start, num_heads, count, COUNT: tl.constexpr, TMA: tl.constexpr):
    """Return numbers start + arange(COUNT) of a head of x (B, H, count) float32, (COUNT,), zero outside."""
    if TMA:
        return tl.reshape(x.load([b.to(tl.int32), h.to(tl.int32), start]), [COUNT])
    else:  # noqa: RET505
        i = start + tl.arange(0, COUNT)
        return tl.load(x + (b * num_heads + h) * ((count + 3) // 4 * 4) + i, mask=i < count, other=0.0)


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
def biased(scores, b, h, i, j, num_queries, num_keys, bias_ptr, bias_strides, BIAS: tl.constexpr):
    """Return scores in base 2 with their bias, -inf where it masks; i and j as of `masked`.

    A bias that is equal for all queries ("keys") is loaded once for a block's keys, not for each element.
    """
    at = bias_ptr + b * bias_strides[0] + h * bias_strides[1] + j.to(tl.int64) * bias_strides[3]
    inside = j < num_keys
    if BIAS == "scores":
        at += i.to(tl.int64) * bias_strides[2]
        inside = inside & (i < num_queries)
    bias = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    return scores + tl.where(bias < UNSEEN, float("-inf"), bias) * LOG2E


@jit
def masked(
    x, hidden, b, i, j, num_queries, num_keys, key_padding_ptr, key_padding_strides, query_documents_ptr,
    query_documents_strides, key_documents_ptr, key_documents_strides,
    CAUSAL: tl.constexpr, END: tl.constexpr, HAS_PADDING: tl.constexpr, HAS_DOCUMENTS: tl.constexpr,
):
    """Return x, a block of scores or weights, and `hidden` where a query does not see a key.

    i and j are the indices of queries and keys, in shapes that broadcast to those of x, in either order.
    """
    if HAS_DOCUMENTS:
        of_queries = query_documents_ptr + b * query_documents_strides[0]
        of_queries = tl.load(of_queries + i.to(tl.int64) * query_documents_strides[1], mask=i < num_queries, other=0)
        of_keys = key_documents_ptr + b * key_documents_strides[0]
        of_keys = tl.load(of_keys + j.to(tl.int64) * key_documents_strides[1], mask=j < num_keys, other=0)
        x = tl.where(of_queries == of_keys, x, hidden)
    if HAS_PADDING:
        key_padding = key_padding_ptr + b * key_padding_strides[0]
        real = tl.load(key_padding + j.to(tl.int64) * key_padding_strides[1], mask=j < num_keys, other=0)
        x = tl.where(real != 0, x, hidden)
    if CAUSAL:
        x = tl.where(i >= j, x, hidden)
    if END:
        x = tl.where(j < num_keys, x, hidden)
    return x


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


def described(x: Tensor, rows: int, columns: int) -> Any:
    """Return x (B, H, S, D), from `in_vectors`, as the descriptor by which blocks (rows, columns) are loaded.

    The strides of dimensions of one element are replaced, and expanded dimensions copied: descriptors take multiples of
    16 bytes, and it is not documented whether 0 is one.
    """
    shape, steps = list(x.shape), x.stride()
    if 1 in shape[:3] or 0 in steps:
        x = x.contiguous() if any(n > 1 and y == 0 for n, y in zip(shape, steps, strict=True)) else x
        steps = [shape[3] if n == 1 else y for n, y in zip(shape[:3], x.stride(), strict=False)] + [1]
    return TensorDescriptor(x, shape, list(steps), [1, 1, rows, columns])


def empty_rows(x: Tensor) -> Tensor:
    """Return uninitialised memory for a tensor like x (B, H, S, D), laid out as (B, S, H, D), so that heads merge."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def empty_numbers(q: Tensor) -> Tensor:
    """Return uninitialised memory for a float32 per query, (B, H, Sq); each head begins at a multiple of 16 bytes."""
    b, h, m = q.shape[:3]
    return q.new_empty(b, h, cdiv(m, 4) * 4, dtype=torch.float32)[..., :m]


def numbers(row: Mapping[str, int], x: Tensor) -> Any:
    """Return x, from `empty_numbers`, as a launch with this row reads QUERIES of its numbers at a time."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, row["QUERIES"]]) if row["TMA"] else x


def options(
    q: Tensor, k: Tensor, d: int, key_padding: Tensor | None, bias: Tensor | None, seed: Tensor | None,
    query_documents: Tensor | None, key_documents: Tensor | None, causal: bool, scale: float, p: float, offset: int,
) -> dict[str, Any]:
    """Return the arguments that all kernels of attention share, beside q, k and v and their strides.

    `d` is the head dimension without padding, `scale` greater than zero.
    """
    key_documents = query_documents if key_documents is None else key_documents
    if bias is not None:
        bias = bias.expand(*q.shape[:3], k.shape[2])
    return {
        "num_heads": q.shape[1], "num_queries": q.shape[2], "num_keys": k.shape[2], "scale": scale,
        "GROUP": q.shape[1] // max(k.shape[1], 1), "D": d, "BLOCK_D": width(d),
        "key_padding_ptr": key_padding, "bias_ptr": bias, "seed_ptr": seed,
        "key_padding_strides": (0, 0) if key_padding is None else key_padding.stride(),
        "query_documents_ptr": query_documents, "key_documents_ptr": key_documents,
        "query_documents_strides": (0, 0) if query_documents is None else query_documents.stride(),
        "key_documents_strides": (0, 0) if key_documents is None else key_documents.stride(),
        "bias_strides": (0, 0, 0, 0) if bias is None else bias.stride(),
        "offset": offset, "threshold": threshold(p), "kept_scale": 1 / (1 - p),
        "CAUSAL": causal, "HAS_PADDING": key_padding is not None,
        "HAS_DOCUMENTS": query_documents is not None, "BIAS": _varies(bias), "DROPOUT": p > 0,
    }


def width(d: int) -> int:
    """Return the columns of a block for rows of d: a power of two, at least 16, the minimum of tensor cores."""
    return max(16, next_power_of_2(d))


def blocks(queries: int, keys: int, num_warps: int, num_stages: int, *, tma: bool = False) -> dict[str, int]:
    """Return a row of a launch table; with `tma` blocks are loaded by descriptors."""
    return {"QUERIES": queries, "KEYS": keys, "num_warps": num_warps, "num_stages": num_stages, "TMA": tma}


def operands(row: Mapping[str, int], over: str, **tensors: Tensor) -> dict[str, Any]:
    """Return tensors from `in_vectors` as a launch with this row takes them: `NAME_ptr` and `NAME_strides` of each.

    `over` names those of which a block has QUERIES rows; the others' have KEYS.
    """
    arguments: dict[str, Any] = {}
    for name, x in tensors.items():
        rows = row["QUERIES" if name in over.split() else "KEYS"]
        arguments[f"{name}_ptr"] = described(x, rows, width(x.shape[3])) if row["TMA"] else x
        arguments[f"{name}_strides"] = None if row["TMA"] else strides(x)
    return arguments


def _varies(bias: Tensor | None) -> str:
    """Return over what an expanded bias varies: "keys", or both dimensions of the "scores"; "" without one."""
    return "" if bias is None else "scores" if bias.stride(2) else "keys"


def kind(
    q: Tensor, key_padding: Tensor | None, bias: Tensor | None, query_documents: Tensor | None, p: float
) -> tuple[int, int, str]:
    """Return the key of q's row in a launch table: columns, bytes per element, and what takes registers.

    That is a "bias" with whatever else, else another mask or dropout ("masked"); "" without them, causal or not.
    """
    is_masked = p or key_padding is not None or query_documents is not None
    what = "bias" if bias is not None else "masked" if is_masked else ""
    return max(width(q.shape[3]), 64), q.element_size(), what


# Arguments whose values the compiler does not specialise on.
COUNTS = ["num_heads", "num_queries", "num_keys", "offset", "threshold"]
