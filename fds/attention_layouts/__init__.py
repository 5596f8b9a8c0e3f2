"""Layouts of sparse attention: which blocks of keys each block of queries sees, as values that print and combine.

A pattern is a function of the numbers of heads and of blocks to an `AttentionLayout`, which holds the indices of the
blocks that are listed and nothing of the others. `fds.kernels.sparse_attention` computes those alone.

>>> window = local_sliding_window(1, 6, attention="bidirectional")
>>> print((window | bslongformer(1, 6, global_block_indices=[3], num_sliding_window_blocks=1)).causal())
head 0: 14 of 36 blocks
 0 #.....
 1 ##....
 2 .##...
 3 ####..
 4 ...##.
 5 ...###
"""

from fds.attention_layouts.block_masks import from_block_mask, to_block_mask
from fds.attention_layouts.by_length import LayoutByLength
from fds.attention_layouts.layout import AttentionLayout, draw_png, draw_text, per_head
from fds.attention_layouts.pattern import Pattern
from fds.attention_layouts.patterns import (
    bigbird,
    bslongformer,
    dense,
    documents,
    fixed,
    local_sliding_window,
    variable,
)

__all__ = [
    # what a layout is
    "AttentionLayout",
    "LayoutByLength",
    "Pattern",
    "per_head",
    # patterns
    "bigbird",
    "bslongformer",
    "dense",
    "documents",
    "fixed",
    "local_sliding_window",
    "variable",
    # for FlexAttention
    "from_block_mask",
    "to_block_mask",
    # pictures
    "draw_png",
    "draw_text",
]
