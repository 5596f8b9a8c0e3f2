"""Layouts as `BlockMask`s of torch's FlexAttention, and back.

FlexAttention skips blocks of 128 tokens, mostly larger than a layout's. A large block of which all is listed becomes a
full block; one of which a part is listed becomes a partial block, in which a `mask_mod` reads the layout.
A `BlockMask` has indices of all large blocks: it takes memory of their square, 512 KB a head at 32k tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fds.attention_layouts.arguments import check_flags
from fds.attention_layouts.layout import AttentionLayout, check_block
from fds.attention_layouts.pattern import Pattern, of_array
from fds.errors import AttentionLayoutError, is_a, is_int

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_NONE, _ALL = 0, 1  # the first bitmaps: of large blocks of which nothing, and all is listed


def to_block_mask(
    layout: AttentionLayout, *, size: int = 128, causal: bool = False, device: torch.device | str = "cpu"
) -> BlockMask:
    """Return the layout as a `BlockMask` of blocks of `size` tokens, whose `mask_mod` says the same of each token.

    Args:
        layout: of blocks that divide `size`.
        size: tokens of a block of FlexAttention; its kernels take multiples of 128, or what their options say.
        causal: whether a token sees none that follow it, within its own block too.
        device: of the indices.

    The mask is of one batch entry, and of one head where all heads are alike; FlexAttention broadcasts both. Raises
    `AttentionLayoutError` for a size that is no multiple of the layout's block, and for what is no layout or device.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if not is_a(layout, AttentionLayout):
        raise AttentionLayoutError(
            "not a layout", where="to_block_mask", got=repr(layout)[:80], want="an AttentionLayout"
        )
    if not is_int(size, 1) or size % layout.block:
        raise AttentionLayoutError(
            "blocks of the layout do not fit into those of FlexAttention",
            where="size",
            got=repr(size),
            want=f"a multiple of the layout's block, {layout.block}",
        )
    check_flags("to_block_mask", causal=causal)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise AttentionLayoutError(
            "not a device", where="device", got=repr(device)[:80], want='such as "cpu" or "cuda"'
        ) from error
    heads = (0,) if len(layout.patterns) == 1 else layout.heads
    tables, bitmaps = _coarse([layout.patterns[i] for i in heads], size // layout.block, causal)
    is_full = tables == _ALL
    if causal:  # a block on the diagonal needs the mask
        is_full &= np.tri(tables.shape[1], k=-1, dtype=np.bool_)
    indices = lambda listed: (
        torch.from_numpy(listed.sum(-1, dtype=np.int32))[None].to(device),
        torch.from_numpy(np.argsort(~listed, axis=-1, kind="stable").astype(np.int32))[None].to(device),
    )
    return BlockMask.from_kv_blocks(
        *indices((tables != _NONE) & ~is_full),
        *indices(is_full),
        BLOCK_SIZE=size,
        mask_mod=_mask_mod(tables, bitmaps, size, layout.block, causal, device),
        seq_lengths=(layout.tokens, layout.tokens),
    )


def _coarse(patterns: list[Pattern], ratio: int, causal: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the bitmap of each large block (heads, n, n), and bitmaps (m, ratio, ratio) of which blocks it lists."""
    n = -(-patterns[0].blocks // ratio)
    tables = np.zeros((len(patterns), n, n), np.int32)
    bitmaps = [np.zeros((ratio, ratio), np.bool_), np.ones((ratio, ratio), np.bool_)]
    for h, pattern in enumerate(patterns):
        for row in range(n):
            array = np.zeros((ratio, n * ratio), np.bool_)
            for r in range(row * ratio, min((row + 1) * ratio, pattern.blocks)):
                array[r - row * ratio, pattern.row(r)] = True
            cells = array.reshape(ratio, n, ratio).transpose(1, 0, 2)
            counts = cells.sum((1, 2))
            if causal:
                counts[row + 1 :] = 0
            tables[h, row, counts == ratio**2] = _ALL
            mixed = np.flatnonzero((counts > 0) & (counts < ratio**2))
            tables[h, row, mixed] = np.arange(len(mixed)) + len(bitmaps)
            bitmaps += list(cells[mixed])
    return tables, np.stack(bitmaps)


def _mask_mod(
    tables: NDArray[Any], bitmaps: NDArray[Any], size: int, block: int, causal: bool, device: torch.device | str
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    table, bitmap = torch.from_numpy(tables).to(device), torch.from_numpy(bitmaps).to(device)
    is_shared = len(tables) == 1

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Return whether query q of head h sees key kv."""
        which = table[h * 0 if is_shared else h, q // size, kv // size]
        seen = bitmap[which, q % size // block, kv % size // block]
        return seen & (q >= kv) if causal else seen

    return visible


def from_block_mask(mask: BlockMask, *, block: int = 16, causal: bool = False) -> AttentionLayout:
    """Return the layout of a `BlockMask`'s heads, in blocks of `block` tokens.

    Args:
        mask: of one batch entry, and of as many queries as keys. A mask of one head gives a layout of one head.
        block: tokens of a block, a divisor of the mask's. Each block is seen whole, or not at all ...
        causal: ... or, with this, by those queries that do not come before a key: for `sparse_attention(causal=True)`.

    Raises `AttentionLayoutError`, which draws the block, for a mask that blocks cannot say; and for what is no mask.
    """
    from torch.nn.attention.flex_attention import BlockMask

    check_block("from_block_mask", block)
    check_flags("from_block_mask", causal=causal)
    if not is_a(mask, BlockMask):
        raise AttentionLayoutError("not a mask", where="mask", got=repr(mask)[:80], want="a BlockMask of FlexAttention")
    sizes = mask.BLOCK_SIZE
    if any(size % block for size in sizes):
        raise AttentionLayoutError(
            "blocks do not fit into those of the mask", where="block", got=str(block), want=f"a divisor of {sizes}"
        )
    queries, keys = mask.seq_lengths
    if mask.kv_num_blocks.dim() != 3 or mask.kv_num_blocks.shape[0] != 1 or queries != keys:
        raise AttentionLayoutError(
            "the mask is not of one square",
            where="from_block_mask",
            got=f"{tuple(mask.kv_num_blocks.shape[:-1])} (batch, heads), {queries} queries, {keys} keys",
            want="(1, heads), and as many queries as keys",
        )
    n = -(-queries // block)
    arrays = np.zeros((mask.kv_num_blocks.shape[1], n, n), np.bool_)
    for h in range(len(arrays)):
        for rows, columns, seen in _cells(mask, h):
            _list_blocks(arrays[h], h, rows.cpu(), columns.cpu(), seen.cpu(), block, queries, causal)
    return AttentionLayout.of([of_array(array) for array in arrays], block)


def _cells(mask: BlockMask, head: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the queries (size,) and keys (size,) of each block of the mask, and which of them see (queries, keys)."""
    height, width = mask.BLOCK_SIZE
    device = mask.kv_indices.device
    kinds = [(mask.kv_num_blocks, mask.kv_indices, False)]
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        kinds.append((mask.full_kv_num_blocks, mask.full_kv_indices, True))
    number = lambda x: torch.tensor(x, device=device)
    over_keys = torch.vmap(mask.mask_mod, in_dims=(None, None, None, 0))
    over_both = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    for counts, indices, is_full in kinds:
        for row, num in enumerate(counts[0, head].tolist()):
            rows = row * height + torch.arange(height, device=device)
            for column in indices[0, head, row, :num].tolist():
                columns = column * width + torch.arange(width, device=device)
                # a mask_mod need not know tokens beyond the last, which are left out below
                last_q, last_kv = (length - 1 for length in mask.seq_lengths)
                at = (number(0), number(head), rows.clamp(max=last_q), columns.clamp(max=last_kv))
                seen = torch.ones(height, width, dtype=torch.bool, device=device) if is_full else over_both(*at)
                yield rows, columns, seen


def _list_blocks(
    array: NDArray[Any], head: int, rows: Tensor, columns: Tensor, seen: Tensor, block: int, tokens: int, causal: bool
) -> None:
    """List the blocks of a large one in `array` (blocks, blocks), each of which must be seen whole or not at all."""
    inside = (rows < tokens)[:, None] & (columns < tokens)[None, :]
    whole = inside & (rows[:, None] >= columns[None, :]) if causal else inside
    fine = lambda x: x.view(len(rows) // block, block, len(columns) // block, block).transpose(1, 2)
    seen, whole = fine(seen & inside), fine(whole)
    listed = seen.any(3).any(2)
    wrong = listed & (seen != whole).any(3).any(2)
    first_row, first_column = int(rows[0]) // block, int(columns[0]) // block
    if wrong.any():
        r, c = wrong.nonzero()[0].tolist()
        picture = "\n".join("".join(".#"[x] for x in line[:40]) for line in seen[r, c].int().tolist()[:40])
        raise AttentionLayoutError(
            "the mask sees a part of a block",
            where=f"head {head}, block ({first_row + r}, {first_column + c})",
            got=picture,
            want="all of it or nothing" + " but for what follows a query" * causal,
            hint="a smaller block" + "; causal=True where a mask is causal" * (not causal),
        )
    listed = listed.numpy()[: len(array) - first_row, : len(array) - first_column]
    array[first_row : first_row + listed.shape[0], first_column : first_column + listed.shape[1]] |= listed
