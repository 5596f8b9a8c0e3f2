"""Trained sparsity: each query chooses the blocks of keys whose means it likes best, and its own block.

q (B, H, S, D) and k (B, G, S, D), with heads as of `sparse_attention`; a row is `together` queries side by side::

    score(row, block) = mean(q of the row) . mean(k of the block)
    chosen(row)       = the row's own block, and those of the `top` greatest scores among others (causal: before it)

There is no gradient through the choice: what trains it are the attention's gradients of q and k, by which a block
that is useful comes to be liked. `together=1` is MoBA, in which each token chooses.
Moves: q once, k once, and scores of rows by blocks, some rows at a time.

Sources: Lu et al. 2025, "MoBA: mixture of block attention", arXiv:2502.13189; Xiao et al. 2025, "Optimizing mixture of
block attention", arXiv:2511.11571 (small blocks).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.errors import KernelError, is_int
from fds.kernels import arguments
from fds.kernels.language import cdiv

SCORES = 2**22  # of rows by blocks, that are in memory at once: 16 MB


class BlockSelection(NamedTuple):  # a tuple, since torch.compile makes no frozen record of attrs
    """Which blocks of keys rows of queries chose: of each head, and each entry of the batch.

    `sparse_attention` takes it in the place of a layout, as often as it is given.

    Attributes:
        chosen: (B, H, rows, most) int32 or int64 numbers of blocks, in any order; what is no block, as -1, is none.
        tokens: S, the number of queries; rows is S / together, rounded up.
        block: tokens of a block.
        together: queries of a row, a divisor of `block`.
    """

    chosen: Tensor
    tokens: int
    block: int = 64
    together: int = 1

    def check(self, q: Tensor) -> None:
        """Raise `KernelError` unless this is a selection for queries (B, H, S, D)."""
        self._check_itself()
        chosen, rows = self.chosen, (*q.shape[:2], cdiv(q.shape[2], self.together))
        if self.tokens != q.shape[2] or tuple(chosen.shape[:-1]) != rows or not chosen.shape[-1]:
            raise KernelError(
                "the selection is of other queries", where="layout", got=f"{tuple(chosen.shape)}, {self.tokens} tokens",
                want=f"{(*rows, '1 or more')}, {q.shape[2]} tokens in rows of {self.together}",
            )
        if chosen.device != q.device:
            raise KernelError(
                "the selection is on another device than q", where="chosen", got=str(chosen.device), want=str(q.device)
            )

    def _check_itself(self) -> None:
        chosen = self.chosen
        _check_sizes("BlockSelection", self.block, self.together)
        if not isinstance(chosen, Tensor) or chosen.dtype not in (torch.int32, torch.int64) or chosen.dim() != 4:
            got = f"{tuple(chosen.shape)} {chosen.dtype}" if isinstance(chosen, Tensor) else type(chosen).__name__
            want = "(B, H, rows, most) torch.int32 or int64"
            raise KernelError("chosen are numbers of blocks", where="chosen", got=got, want=want)
        if not is_int(self.tokens, 0) or cdiv(self.tokens, self.together) != chosen.shape[2]:
            got, want = f"{self.tokens!r:.40}, {chosen.shape[2]} rows", f"rows of {self.together}, rounded up"
            raise KernelError("the rows of a selection are of its tokens", where="tokens", got=got, want=want)

    def load(self) -> Tensor:
        """Return which share of a head's choices falls on each block, (H, blocks) float32; own blocks do not count.

        Raises `KernelError` for what is no selection.
        """
        self._check_itself()
        chosen, heads, blocks = self.chosen, self.chosen.shape[1], cdiv(self.tokens, self.block)
        place = torch.arange(chosen.shape[2], device=chosen.device) * self.together // self.block
        is_choice = (chosen != place[:, None]) & (chosen >= 0) & (chosen < blocks)
        by_head = lambda x: x.transpose(0, 1).flatten(1)
        counts = torch.zeros(heads, blocks, device=chosen.device)
        counts.scatter_add_(1, by_head(chosen).long().clamp(0, blocks - 1), by_head(is_choice).float())
        return counts / counts.sum(1, keepdim=True).clamp(min=1)

    def metrics(self) -> dict[str, Tensor]:
        """Return how evenly blocks are chosen, as means over heads, () float32, for the metrics of a loss.

        `block_entropy` is the entropy of `load` as a share of the greatest, 1 where all blocks are chosen as often;
        `most_chosen_block` is the greatest load of a block.
        """
        load = self.load()
        entropy = -torch.special.xlogy(load, load).sum(1) / math.log(max(load.shape[1], 2))
        return {"block_entropy": entropy.mean(), "most_chosen_block": load.amax(1).mean()}


def select_blocks(
    q: Tensor, k: Tensor, *, top: int, block: int = 64, together: int = 1, causal: bool = True,
    key_padding: Tensor | None = None, documents: Tensor | None = None,
) -> BlockSelection:
    """Return which blocks of keys each row of queries sees: its own, and `top` others whose mean it likes best.

    The same q and k choose the same blocks, so that a layer that is computed again in backward selects what it did.

    Args:
        q: (B, H, S, D) float32, float16, bfloat16 or float64. Scores are computed in float32, or in float64.
        k: (B, G, S, D) of q's dtype, where G divides H: query head h reads key head h // (H / G).
        top: blocks beside a row's own; MoBA counts that as well, so that its top-k of 3 is 2 here.
        block: tokens of a block. The last may be partly empty.
        together: queries that choose as one, by the mean of theirs; a divisor of `block`. 1 for MoBA; as many as a
            block has, for lists as short as can be.
        causal: whether only blocks before a row's own are chosen.
        key_padding: (B, S) bool, False where a key is padding: means leave it out, and blocks of nothing else.
        documents: (B, S) int32 or int64, side by side in a row: blocks of other documents than those of a row's first
            query are left out.

    Raises `KernelError` for any other dtype, shape or device, and for numbers out of range.
    """
    arguments.attention(q, k, k, key_padding, None, None, 0.0, documents)
    arguments.flags(causal=causal)
    _check_sizes("select_blocks", block, together)
    if not is_int(top, 0):
        raise KernelError("top is a number of blocks", where="top", got=repr(top)[:80], want="an int >= 0")
    if k.shape[2] != q.shape[2]:
        got = f"{k.shape[2]} keys, {q.shape[2]} queries"
        raise KernelError("blocks are selected for self-attention", where="k", got=got, want="as many")
    with torch.autocast(q.device.type, enabled=False):
        chosen = _chosen(q.detach(), k.detach(), top, block, together, causal, key_padding, documents)
    return BlockSelection(chosen, q.shape[2], block, together)


def _check_sizes(where: str, block: Any, together: Any) -> None:
    if not is_int(block, 1):
        raise KernelError(f"{where}: block is a number of tokens", where="block", got=repr(block)[:80], want=">= 1")
    if not is_int(together, 1) or block % together:
        raise KernelError(
            f"{where}: rows of queries do not divide a block", where="together", got=repr(together)[:80],
            want=f"a divisor of {block}",
        )


def _chosen(
    q: Tensor, k: Tensor, top: int, block: int, together: int, causal: bool, key_padding: Tensor | None,
    documents: Tensor | None,
) -> Tensor:
    (b, h, tokens, d), blocks, rows = q.shape, cdiv(q.shape[2], block), cdiv(q.shape[2], together)
    most = min(top, blocks - 1)
    chosen = torch.full((b, h, rows, 1 + most), -1, dtype=torch.int32, device=q.device)
    place = torch.arange(rows, device=q.device) * together // block
    chosen[..., 0] = place
    if not most or not q.numel():
        return chosen
    means, counts = _means(k, key_padding, block)
    means = means[:, :, None].mT
    queries = _means(q, None, together)[0].view(b, k.shape[1], -1, rows, d)
    number = first = last = place
    if documents is not None:  # in the order of a row, in which a block has those from its first to its last
        number = F.pad(documents.diff(dim=1) != 0, (1, 0)).cumsum(1)
        ends = torch.arange(block - 1, blocks * block, block, device=q.device).clamp(max=tokens - 1)
        number, first, last = number[:, ::together], number[:, None, ::block], number[:, None, ends]
    columns = torch.arange(blocks, device=q.device)
    at_once = max(1, SCORES // (b * h * blocks))
    for i in range(0, rows, at_once):
        part = slice(i, i + at_once)
        may = (columns < place[part, None] if causal else columns != place[part, None]) & (counts > 0)
        if documents is not None:
            may = may & (first <= number[:, part, None]) & (number[:, part, None] <= last)
        scores = (queries[:, :, :, part] @ means).flatten(1, 2)
        best = scores.masked_fill_(~may[:, None], -math.inf).topk(most)
        chosen[:, :, part, 1:] = torch.where(best.values == -math.inf, -1, best.indices)
    return chosen


def _means(x: Tensor, real: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    """Return the means (B, H, n, D) of so many tokens of x each, wide, and how many are real, (B or 1, 1, n)."""
    x, missing = x.to(arguments.width(x)), -x.shape[2] % size
    if real is None:
        real = torch.ones(1, x.shape[2], dtype=torch.bool, device=x.device)
    else:
        x = x.masked_fill(~real[:, None, :, None], 0.0)
    counts = F.pad(real, (0, missing)).view(len(real), 1, -1, size).sum(-1)
    x = F.pad(x, (0, 0, 0, missing)) if missing else x
    return x.unflatten(2, (-1, size)).sum(3) / counts.clamp(min=1)[..., None], counts
