"""What a layout or a selection lists, as the kernels of `sparse_attention` read it, and the loop over it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fds.attention_layouts import AttentionLayout
from fds.attention_layouts.layout import by_key
from fds.kernels.flash_blocks import LOG2E, options, width
from fds.kernels.language import cdiv, jit, tl

BLOCKS = (16, 32, 64, 128)  # tokens of a block that kernels take
COUNTS = ["num_heads", "num_queries", "num_keys", "offset", "threshold", "num_blocks", "num_lists"]


def by_row(
    q: Tensor, chosen: Tensor | None, layout: int, block: int, together: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the columns that rows list, of a selection, or of the layout with a key.

    They are: the list of each head, (H,) or (B * H,) int32; starts (lists, blocks + 1) int64 and columns int32, of
    which row r of a list has those from starts[r] to starts[r + 1], ascending.
    """
    if chosen is None:
        return of_layout(by_key(layout), q.shape[1], causal, False, q.device)
    lists = torch.arange(q.shape[0] * q.shape[1], dtype=torch.int32, device=q.device)
    keys, is_new = _listed(q, chosen, block, together, causal)
    counts = is_new.sum(2)
    ends = counts.flatten().cumsum(0)
    starts = (ends - counts.flatten()).view_as(counts)
    starts = torch.cat([starts, ends.view_as(counts)[:, -1:]], dim=1)
    room = counts.numel() * min(keys.shape[2], keys.shape[1])  # as many as there may be: no number is read
    places = torch.where(is_new, starts[:, :-1, None] + is_new.cumsum(2) - 1, room)
    columns = keys.new_zeros(room + 1, dtype=torch.int32).scatter_(0, places.flatten(), keys.flatten().int())
    columns[room:].zero_()  # where what is not new went
    return lists, starts, columns


def by_column(
    q: Tensor, chosen: Tensor | None, layout: int, block: int, together: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows by which columns are listed, as `by_row` returns the columns of rows."""
    if chosen is None:
        return of_layout(by_key(layout), q.shape[1], causal, True, q.device)
    lists = torch.arange(q.shape[0] * q.shape[1], dtype=torch.int32, device=q.device)
    keys, is_new = _listed(q, chosen, block, together, causal)
    num, blocks, most = keys.shape
    keys = torch.where(is_new, keys, blocks) + torch.arange(num, device=q.device)[:, None, None] * (blocks + 1)
    keys, order = keys.flatten().sort(stable=True)
    places = torch.arange(num * (blocks + 1), device=q.device)
    starts = torch.searchsorted(keys, places).view(num, blocks + 1)  # a list ends where what it does not list begins
    return lists, starts, (order // most % blocks).int()


def of_blocks(chosen: Tensor, blocks: int, rows: int) -> Tensor:
    """Return what the `rows` rows of each block of queries choose, (B * H, blocks, rows, most) int64, -1 for none."""
    num, most = chosen.shape[0] * chosen.shape[1], chosen.shape[3]
    padded = chosen.new_full((num, blocks * rows, most), -1, dtype=torch.int64)
    padded[:, : chosen.shape[2]] = chosen.flatten(0, 1)
    return padded.view(num, blocks, rows, most)


def _listed(q: Tensor, chosen: Tensor, block: int, together: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Return what blocks of queries choose (B * H, blocks, most) int64, ascending, and which of that is new in it.

    Whatever is no block counts as none, so that no selection has kernels read what is not there.
    """
    blocks = cdiv(q.shape[2], block)
    keys = of_blocks(chosen, blocks, block // together).flatten(2)
    last = torch.arange(blocks, device=q.device)[:, None] if causal else blocks - 1
    keys = torch.where((keys < 0) | (keys > last), blocks, keys).sort(2).values
    is_new = keys < blocks
    is_new[:, :, 1:] &= keys[:, :, 1:] != keys[:, :, :-1]
    return keys, is_new


@functools.lru_cache(maxsize=64)
def of_layout(
    layout: AttentionLayout, num_heads: int, causal: bool, is_transposed: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the rows of a layout list, or the columns of it; a layout of one head is that of all heads."""
    if causal:
        layout = layout.causal()
    patterns = [pattern.transposed() if is_transposed else pattern for pattern in layout.patterns]
    firsts = np.cumsum([0, *(pattern.nonzeros for pattern in patterns[:-1])])
    starts = np.stack([first + pattern.starts for first, pattern in zip(firsts, patterns, strict=True)])
    heads = layout.heads * (num_heads if layout.num_heads == 1 else 1)
    tensor = lambda array, dtype: torch.from_numpy(np.array(array, dtype=dtype)).to(device)
    columns = np.concatenate([pattern.columns for pattern in patterns])
    return tensor(heads, np.int32), tensor(starts, np.int64), tensor(columns, np.int32)


@jit
def listed_range(lists_ptr, starts_ptr, head, block, num_blocks, PARTS: tl.constexpr):
    """Return the range of what a block of a head lists, in parts of a block."""
    at = starts_ptr + tl.load(lists_ptr + head).to(tl.int64) * (num_blocks + 1) + block
    return tl.load(at) * PARTS, tl.load(at + 1) * PARTS


@jit
def listed_start(indices_ptr, part, BLOCK: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Return the first token of a part of a listed block."""
    return tl.load(indices_ptr + part // PARTS) * BLOCK + tl.cast(part % PARTS, tl.int32) * SIZE


@jit
def is_chosen(chosen_ptr, bh, i, column, num_queries, MOST: tl.constexpr, TOGETHER: tl.constexpr):
    """Return which queries i (QUERIES,) of a head chose a column, of int32 (B, H, rows, MOST)."""
    at = chosen_ptr + (bh * tl.cdiv(num_queries, TOGETHER) + i // TOGETHER) * MOST
    seen = tl.zeros_like(i)
    for place in range(MOST):
        seen += (tl.load(at + place, mask=i < num_queries, other=-1) == column).to(tl.int32)
    return seen > 0


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
    seed: Tensor | None, documents: Tensor | None, chosen: Tensor | None, lists: Tensor, block: int, together: int,
    causal: bool, scale: float, p: float, offset: int,
) -> dict[str, Any]:
    """Return the arguments that all kernels share beside q, k and v and the lists."""
    finer = None
    if chosen is not None and together < block:  # queries choose some of what their block lists
        finer = chosen.clamp(-1, 2**31 - 1).int().contiguous()
    if relative_bias is not None:
        relative_bias = relative_bias.expand(q.shape[1], relative_bias.shape[1])
    return {
        **options(q, k, d, key_padding, bias, seed, documents, None, causal, scale, p, offset),
        "num_blocks": cdiv(q.shape[2], block), "num_lists": len(lists), "relative_ptr": relative_bias,
        "relative_strides": (0, 0) if relative_bias is None else relative_bias.stride(),
        "RELATIVE": relative_bias is not None,
        "chosen_ptr": finer, "MOST": 0 if finer is None else finer.shape[3], "TOGETHER": together or 1,
    }


def kind(q: Tensor) -> tuple[int, int]:
    """Return the key of q's row in a launch table: columns and bytes per element."""
    return max(width(q.shape[3]), 64), q.element_size()
