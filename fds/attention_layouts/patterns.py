"""The patterns of sparse attention, as functions of heads and blocks: those of DeepSpeed 0.19.6, and of documents.

Parameters have DeepSpeed's names and defaults, and a layout lists the same blocks as DeepSpeed's at the length that is
asked; `cropped` says how to have those of its module. What it takes without a word and does not do is refused: a
global block beyond the last, an unknown kind of attention.

Random blocks follow from a key. A `random.Random` in its place is drawn from as DeepSpeed draws from Python's global
generator, so that a layout made there can be made again.

Sources: Child et al. 2019, arXiv:1904.10509 (fixed); Zaheer et al. 2020, arXiv:2007.14062 (bigbird); Beltagy et al.
2020, arXiv:2004.05150 (bslongformer).
"""

from __future__ import annotations

import random as python_random
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from fds import random
from fds.attention_layouts.arguments import (
    BIDIRECTIONAL,
    UNIDIRECTIONAL,
    as_array,
    check,
    check_attention,
    check_flags,
    check_within,
    integers,
    ranges,
)
from fds.attention_layouts.layout import AttentionLayout
from fds.attention_layouts.pattern import Pattern, of_intervals
from fds.errors import AttentionLayoutError


def dense(heads: int, blocks: int, *, block: int = 16) -> AttentionLayout:
    """Return the layout that lists all blocks.

    Args:
        heads: number of heads.
        blocks: number of blocks of queries, and of keys.
        block: tokens of a block.

    Raises `AttentionLayoutError` for numbers below 1.
    """
    check("dense", heads=heads, blocks=blocks, block=block)
    first = np.zeros(blocks, np.int64)
    return AttentionLayout.of([of_intervals(first, first + blocks)] * heads, block)


def fixed(
    heads: int,
    blocks: int,
    *,
    block: int = 16,
    num_local_blocks: int = 4,
    num_global_blocks: int = 1,
    attention: str = BIDIRECTIONAL,
    horizontal_global_attention: bool = False,
    num_different_global_patterns: int = 1,
    different_layout_per_head: bool = False,
) -> AttentionLayout:
    """Return windows side by side, and of each window global blocks that all rows, or the rows from there on, see.

    Args:
        heads: number of heads.
        blocks: number of blocks of queries, and of keys.
        block: tokens of a block.
        num_local_blocks: blocks of a window.
        num_global_blocks: global blocks of a window, its last ones; they divide the window.
        attention: "bidirectional"; "unidirectional" for rows that see their window up to themselves. Global blocks are
            whole there, so with more than one a row may see later blocks: `.causal()` takes these away.
        horizontal_global_attention: whether global blocks see all blocks, too; only bidirectional.
        num_different_global_patterns: how many heads in turn take other blocks of the window as global ones.
        different_layout_per_head: whether heads may differ, which several patterns need.

    Raises `AttentionLayoutError` for numbers out of range, and arguments that contradict each other.
    """
    check(
        "fixed",
        heads=heads,
        blocks=blocks,
        block=block,
        num_local_blocks=num_local_blocks,
        num_global_blocks=num_global_blocks,
        num_different_global_patterns=num_different_global_patterns,
    )
    check_flags("fixed", horizontal_global_attention=horizontal_global_attention)
    check_flags("fixed", different_layout_per_head=different_layout_per_head)
    check_attention("fixed", attention, horizontal_global_attention)
    n, g = num_local_blocks, num_global_blocks
    if n % g:
        raise AttentionLayoutError(
            "fixed: global blocks do not divide the window",
            where="num_global_blocks",
            got=f"{g} in windows of {n}",
            want=f"a divisor of {n}",
        )
    if num_different_global_patterns > 1 and not different_layout_per_head:
        raise AttentionLayoutError(
            "fixed: heads of one layout have one pattern",
            where="num_different_global_patterns",
            got=str(num_different_global_patterns),
            want="1",
            hint="different_layout_per_head=True",
        )
    if num_different_global_patterns > n // g:
        raise AttentionLayoutError(
            "fixed: a window has no room for so many patterns",
            where="num_different_global_patterns",
            got=f"{num_different_global_patterns} of {g} in windows of {n}",
            want=f"at most {n // g}",
        )
    check_within("fixed", "num_global_blocks", blocks, g)
    row = np.arange(blocks)
    window = row // n * n
    is_causal = attention == UNIDIRECTIONAL
    patterns: list[Pattern] = []
    for h in range(num_different_global_patterns):
        first, end = n - (1 + h) * g, blocks // n * n
        begins = np.arange(first, end, n)
        if end < blocks:  # a short last window
            begins = np.append(begins, min(end + first, blocks - g))
        patterns.append(
            _assembled(
                window,
                row + 1 if is_causal else np.minimum(window + n, blocks),
                begins,
                begins + g,
                is_causal,
                horizontal_global_attention,
            )
        )
    return AttentionLayout.of([patterns[h % num_different_global_patterns] for h in range(heads)], block)


def variable(
    heads: int,
    blocks: int,
    *,
    key: int | Tensor | python_random.Random = 0,
    block: int = 16,
    num_random_blocks: int = 0,
    local_window_blocks: Sequence[int] = (4,),
    global_block_indices: Sequence[int] = (0,),
    global_block_end_indices: Sequence[int] | None = None,
    attention: str = BIDIRECTIONAL,
    horizontal_global_attention: bool = False,
    different_layout_per_head: bool = False,
) -> AttentionLayout:
    """Return windows of listed sizes, of which the last repeats, global blocks, and random blocks of each row.

    Args:
        heads: number of heads.
        blocks: number of blocks of queries, and of keys.
        key: from which random blocks follow: an integer, a key, or a `random.Random` to draw from as DeepSpeed does.
        block: tokens of a block.
        num_random_blocks: random blocks of a row, of all its blocks, also where attention is unidirectional.
        local_window_blocks: blocks of the first window, of the second, and so on.
        global_block_indices: global blocks; the first of a range each, where their ends are listed.
        global_block_end_indices: where ranges of global blocks end, exclusive.
        attention: "bidirectional"; "unidirectional" for rows that see their window, and global blocks from there on.
        horizontal_global_attention: whether global blocks see all blocks, too; only bidirectional.
        different_layout_per_head: whether heads draw other random blocks.

    Raises `AttentionLayoutError` for numbers out of range, and arguments that contradict each other.
    """
    check("variable", heads=heads, blocks=blocks, block=block)
    check("variable", 0, num_random_blocks=num_random_blocks)
    check_flags("variable", horizontal_global_attention=horizontal_global_attention)
    check_flags("variable", different_layout_per_head=different_layout_per_head)
    check_attention("variable", attention, horizontal_global_attention)
    check_within("variable", "num_random_blocks", blocks, num_random_blocks)
    sizes = integers("variable", "local_window_blocks", local_window_blocks, 1)
    if not len(sizes):
        raise AttentionLayoutError("variable: there is no window", where="local_window_blocks", got="()", want="(4,)")
    begins, ends = ranges("variable", blocks, global_block_indices, global_block_end_indices)
    edges = np.cumsum(np.append(0, sizes))
    edges = np.append(edges[:-1], np.arange(edges[-1], max(blocks, edges[-1]) + sizes[-1], sizes[-1]))
    row = np.arange(blocks)
    at = np.searchsorted(edges, row, "right")
    is_causal = attention == UNIDIRECTIONAL
    stops = row + 1 if is_causal else np.minimum(edges[at], blocks)
    pattern = _assembled(edges[at - 1], stops, begins, ends, is_causal, horizontal_global_attention)
    drawn = _drawn(heads if different_layout_per_head else 1, np.full(blocks, blocks), num_random_blocks, key)
    return AttentionLayout.of(_spread([pattern.merged(x, 1) for x in drawn] or [pattern], heads), block)


def bigbird(
    heads: int,
    blocks: int,
    *,
    key: int | Tensor | python_random.Random = 0,
    block: int = 16,
    num_random_blocks: int = 1,
    num_sliding_window_blocks: int = 3,
    num_global_blocks: int = 1,
    attention: str = BIDIRECTIONAL,
    different_layout_per_head: bool = False,
) -> AttentionLayout:
    """Return a sliding window, the first blocks seen by all rows and seeing all, and random blocks of each row.

    Args:
        heads: number of heads.
        blocks: number of blocks of queries, and of keys.
        key: from which random blocks follow: an integer, a key, or a `random.Random` to draw from as DeepSpeed does.
        block: tokens of a block.
        num_random_blocks: random blocks of a row; unidirectional, of those up to the row's own.
        num_sliding_window_blocks: blocks of the window, half of them, rounded down, on either side of the row's own.
        num_global_blocks: global blocks, the first ones.
        attention: "bidirectional", or "unidirectional" for blocks up to the row's own alone.
        different_layout_per_head: whether heads draw other random blocks.

    Raises `AttentionLayoutError` for numbers out of range.
    """
    check("bigbird", heads=heads, blocks=blocks, block=block, num_sliding_window_blocks=num_sliding_window_blocks)
    check("bigbird", 0, num_random_blocks=num_random_blocks, num_global_blocks=num_global_blocks)
    check_flags("bigbird", different_layout_per_head=different_layout_per_head)
    check_attention("bigbird", attention)
    for name, number in (
        ("num_random_blocks", num_random_blocks),
        ("num_sliding_window_blocks", num_sliding_window_blocks),
        ("num_global_blocks", num_global_blocks),
    ):
        check_within("bigbird", name, blocks, number)
    is_causal = attention == UNIDIRECTIONAL
    if is_causal and num_random_blocks > 1:
        raise AttentionLayoutError(
            "bigbird: row 0 has one block to draw from",
            where="num_random_blocks",
            got=f"{num_random_blocks}\n#{'.' * min(blocks - 1, 40)}  row 0",
            want="0 or 1 where unidirectional",
            hint="bigbird(..., attention='bidirectional').causal() draws of all blocks, and keeps those before a row",
        )
    pattern = _sliding(
        blocks, num_sliding_window_blocks, np.arange(num_global_blocks), np.arange(num_global_blocks) + 1, is_causal
    )
    populations = np.arange(1, blocks + 1) if is_causal else np.full(blocks, blocks)
    drawn = _drawn(heads if different_layout_per_head else 1, populations, num_random_blocks, key)
    return AttentionLayout.of(_spread([pattern.merged(x, 1) for x in drawn] or [pattern], heads), block)


def bslongformer(
    heads: int,
    blocks: int,
    *,
    block: int = 16,
    num_sliding_window_blocks: int = 3,
    global_block_indices: Sequence[int] = (0,),
    global_block_end_indices: Sequence[int] | None = None,
    attention: str = BIDIRECTIONAL,
) -> AttentionLayout:
    """Return a sliding window, and global blocks that all rows see and that see all.

    Args:
        heads: number of heads.
        blocks: number of blocks of queries, and of keys.
        block: tokens of a block.
        num_sliding_window_blocks: blocks of the window, half of them, rounded down, on either side of the row's own.
        global_block_indices: global blocks; the first of a range each, where their ends are listed.
        global_block_end_indices: where ranges of global blocks end, exclusive.
        attention: "bidirectional", or "unidirectional" for blocks up to the row's own alone.

    Raises `AttentionLayoutError` for numbers out of range.
    """
    check("bslongformer", heads=heads, blocks=blocks, block=block, num_sliding_window_blocks=num_sliding_window_blocks)
    check_attention("bslongformer", attention)
    check_within("bslongformer", "num_sliding_window_blocks", blocks, num_sliding_window_blocks)
    begins, ends = ranges("bslongformer", blocks, global_block_indices, global_block_end_indices)
    pattern = _sliding(blocks, num_sliding_window_blocks, begins, ends, attention == UNIDIRECTIONAL)
    return AttentionLayout.of([pattern] * heads, block)


def local_sliding_window(
    heads: int, blocks: int, *, block: int = 16, num_sliding_window_blocks: int = 3, attention: str = UNIDIRECTIONAL
) -> AttentionLayout:
    """Return a sliding window alone.

    Args:
        heads: number of heads.
        blocks: number of blocks of queries, and of keys.
        block: tokens of a block.
        num_sliding_window_blocks: blocks of the window, half of them, rounded down, on either side of the row's own.
        attention: "unidirectional" for the side before the row's own alone, or "bidirectional".

    Raises `AttentionLayoutError` for numbers out of range.
    """
    name = "local_sliding_window"
    check(name, heads=heads, blocks=blocks, block=block, num_sliding_window_blocks=num_sliding_window_blocks)
    check_attention(name, attention)
    check_within(name, "num_sliding_window_blocks", blocks, num_sliding_window_blocks)
    none = np.empty(0, np.int64)
    pattern = _sliding(blocks, num_sliding_window_blocks, none, none, attention == UNIDIRECTIONAL)
    return AttentionLayout.of([pattern] * heads, block)


def documents(numbers: ArrayLike, *, block: int = 16) -> AttentionLayout:
    """Return the layout of one head whose blocks see those with which they share a document, for packed rows.

    Where a block has parts of several documents, `sparse_attention(documents=)` keeps these apart.

    Args:
        numbers: (S,) or (B, S) integers, the document of each token, as `fds.data.packed` gives them. Of several rows
            what any of them needs is listed. The last block may be partly empty.
        block: tokens of a block.

    Raises `AttentionLayoutError` for anything else, and for a document in two places of a row.

    >>> print(documents([0, 0, 0, 0, 0, 1, 1, 1], block=2))
    head 0: 12 of 16 blocks
     0 ###.
     1 ###.
     2 ####
     3 ..##
    """
    check("documents", block=block)
    array = np.atleast_2d(as_array("documents", numbers, "(S,) or (B, S) integers"))
    if array.ndim != 2 or not array.size or array.dtype.kind not in "iu":
        got = f"{array.shape} {array.dtype}"
        raise AttentionLayoutError("documents are numbers of tokens", where="documents", got=got, want="(S,) or (B, S)")
    # a block sees itself in every row, so what rows need of it is an interval, and so is what all of them do
    begins, ends = zip(*(_document_intervals(i, row, block) for i, row in enumerate(array)), strict=True)
    return AttentionLayout.of([of_intervals(np.min(begins, axis=0), np.max(ends, axis=0))], block)


def _document_intervals(index: int, numbers: NDArray[Any], block: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the first block that each block of a row of tokens sees, and the one after the last."""
    begins = np.append(0, np.flatnonzero(numbers[1:] != numbers[:-1]) + 1)  # of documents
    again = np.flatnonzero(np.bincount(np.unique(numbers[begins], return_inverse=True)[1]) > 1)
    if len(again):
        number = np.unique(numbers[begins])[again[0]]
        places = begins[numbers[begins] == number]
        raise AttentionLayoutError(
            "documents: a document is in two places",
            where=f"row {index}",
            got=f"document {number} begins at tokens {places[0]} and {places[1]}",
            want="documents side by side",
            hint="a number of its own for what is no document, such as padding",
        )
    ends = np.append(begins[1:], len(numbers))
    first = np.arange(0, len(numbers), block)
    last = np.minimum(first + block, len(numbers)) - 1
    place = lambda tokens: np.searchsorted(begins, tokens, "right") - 1
    return begins[place(first)] // block, (ends[place(last)] - 1) // block + 1


def _sliding(blocks: int, window: int, begins: NDArray[Any], ends: NDArray[Any], is_causal: bool) -> Pattern:
    row, half = np.arange(blocks), window // 2
    lows, highs = np.maximum(row - half, 0), np.minimum(row + half + 1, blocks)
    pattern = _assembled(lows, highs, begins, ends, False, True)
    return pattern.filtered(lambda rows, columns: columns <= rows, blocks) if is_causal else pattern


def _assembled(
    lows: NDArray[Any], highs: NDArray[Any], begins: NDArray[Any], ends: NDArray[Any], is_causal: bool, sees_all: bool
) -> Pattern:
    """Return a window for each row, and global ranges of columns: rows from their first, or all; which may see all."""
    blocks = len(lows)
    since = np.full(blocks, blocks)  # of each column, the first row that sees it as a global one
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        since[begin:end] = np.minimum(since[begin:end], begin if is_causal else 0)
    shared = np.flatnonzero(since < blocks)
    if sees_all:
        lows, highs = lows.copy(), highs.copy()
        lows[shared], highs[shared] = 0, blocks
    return of_intervals(lows, highs, shared, since[shared])


def _drawn(heads: int, populations: NDArray[Any], num: int, key: int | Tensor | python_random.Random) -> list[Pattern]:
    """Return a pattern for each head of `num` different columns a row, of the first `populations[row]`."""
    starts = np.arange(len(populations) + 1) * num
    if not num:
        return []
    if isinstance(key, python_random.Random):
        rows = [[sorted(key.sample(range(n), num)) for n in populations.tolist()] for _ in range(heads)]
        return [Pattern(starts, np.array(row).ravel()) for row in rows]
    return [Pattern(starts, _sampled(populations, num, random.seed(random.key(key), h))) for h in range(heads)]


def _sampled(populations: NDArray[Any], num: int, seed: int) -> NDArray[Any]:
    """Return different columns of each row, uniform among all sets of so many; the same on every machine and version.

    Source: Bentley and Floyd 1987, "Programming pearls: a sample of brilliance", algorithm F2.
    """
    bits = np.random.PCG64(seed)
    chosen = np.empty((len(populations), num), np.int64)
    for i in range(num):
        last = populations - num + i
        uniform = (bits.random_raw(len(populations)) >> np.uint64(11)) * 2.0**-53
        drawn = np.floor(uniform * (last + 1)).astype(np.int64)
        chosen[:, i] = np.where((chosen[:, :i] == drawn[:, None]).any(1), last, drawn)
    return np.sort(chosen, axis=1).ravel()


def _spread(patterns: list[Pattern], heads: int) -> list[Pattern]:
    return patterns * heads if len(patterns) == 1 else patterns
