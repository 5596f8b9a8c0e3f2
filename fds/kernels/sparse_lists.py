"""What the kernels of `sparse_attention` share: layouts as lists on the device, and the loop over what is listed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fds.attention_layouts import AttentionLayout, Pattern
from fds.kernels.flash_blocks import LOG2E, options, width
from fds.kernels.language import jit, tl

BLOCKS = (16, 32, 64, 128)  # tokens of a block that kernels take
COUNTS = ["num_heads", "num_queries", "num_keys", "offset", "threshold", "num_blocks"]


@torch._disable_dynamo  # NumPy makes them, once
@functools.lru_cache(maxsize=32)
def lists(layout: AttentionLayout, causal: bool, device: torch.device) -> tuple[Tensor, ...]:
    """Return the columns that rows list, and the rows by which columns are listed, as the kernels read them.

    They are: the pattern of each head (H,) int32; starts (patterns, blocks + 1) int64 and columns (nonzeros,) int32;
    starts and rows likewise of the transposed patterns.
    """
    if causal:
        layout = layout.causal()
    tensor = lambda array, dtype: torch.from_numpy(np.ascontiguousarray(array, dtype=dtype).copy()).to(device)

    def listed(of: Callable[[Pattern], Pattern]) -> tuple[Tensor, Tensor]:
        patterns = [of(pattern) for pattern in layout.patterns]
        firsts = np.cumsum([0, *(pattern.nonzeros for pattern in patterns[:-1])])
        starts = np.stack([first + pattern.starts for first, pattern in zip(firsts, patterns, strict=True)])
        return tensor(starts, np.int64), tensor(np.concatenate([pattern.columns for pattern in patterns]), np.int32)

    heads = tensor(layout.heads, np.int32)
    return heads, *listed(lambda pattern: pattern), *listed(Pattern.transposed)


@jit
def listed_range(heads_ptr, starts_ptr, h, block, num_blocks, PARTS: tl.constexpr):
    """Return the range of what a block of a head lists, in parts of a block."""
    at = starts_ptr + tl.load(heads_ptr + h).to(tl.int64) * (num_blocks + 1) + block
    return tl.load(at) * PARTS, tl.load(at + 1) * PARTS


@jit
def listed_start(indices_ptr, part, BLOCK: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Return the first token of a part of a listed block."""
    return tl.load(indices_ptr + part // PARTS) * BLOCK + tl.cast(part % PARTS, tl.int32) * SIZE


@jit
def by_distance(scores, h, i, j, num_queries, num_keys, relative_ptr, relative_strides):
    """Return scores in base 2 with their bias by distance; i and j broadcast to their shape."""
    inside = (i < num_queries) & (j < num_keys)
    at = relative_ptr + h * relative_strides[0] + (j - i + num_queries - 1).to(tl.int64) * relative_strides[1]
    return scores + tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2E


def fitted(row: dict[str, int], block: int) -> dict[str, int]:
    """Return a row of a launch table with parts of a block that are no larger than it."""
    queries, keys = min(row["QUERIES"], block), min(row["KEYS"], block)
    is_small = max(queries, keys) <= 16 < max(row["QUERIES"], row["KEYS"])
    warps = 2 if is_small else row["num_warps"]
    return {**row, "QUERIES": queries, "KEYS": keys, "num_warps": warps, "BLOCK": block}


def shared(
    q: Tensor, k: Tensor, d: int, key_padding: Tensor | None, bias: Tensor | None, relative_bias: Tensor | None,
    seed: Tensor | None, documents: Tensor | None, heads: Tensor, blocks: int, causal: bool, scale: float, p: float,
    offset: int,
) -> dict[str, Any]:
    """Return the arguments that all kernels share beside q, k and v and the lists."""
    if relative_bias is not None:
        relative_bias = relative_bias.expand(q.shape[1], relative_bias.shape[1])
    return {
        **options(q, k, d, key_padding, bias, seed, documents, None, causal, scale, p, offset),
        "heads_ptr": heads, "num_blocks": blocks, "relative_ptr": relative_bias,
        "relative_strides": (0, 0) if relative_bias is None else relative_bias.stride(),
        "RELATIVE": relative_bias is not None,
    }


def kind(q: Tensor) -> tuple[int, int]:
    """Return the key of q's row in a launch table: columns and bytes per element."""
    return max(width(q.shape[3]), 64), q.element_size()
