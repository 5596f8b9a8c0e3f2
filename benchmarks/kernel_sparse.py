"""Sparse attention beside its reference, FlexAttention with the same mask, and dense attention by torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_streams import BF16, drawn, together, words
from benchmarks.kernel_works import Setting, Way, Work
from fds.attention_layouts import AttentionLayout, bigbird, bslongformer, to_block_mask
from fds.kernels.block_selection import BlockSelection, select_blocks
from fds.kernels.choice import only
from fds.kernels.sparse import sparse_attention

PHASES = ("forward", "backward", "both")
FLEX_BLOCK = 128  # tokens of a block of FlexAttention
TOP = 4  # blocks that are chosen beside a query's own


def sparse_attentions(setting: Setting) -> Iterator[Work]:
    """Yield causal attention over layouts of a tenth of the blocks, and over blocks that queries choose."""
    b, heads, block = (1, 2, 16) if setting.tiny else (4, 16, 64)
    for s, d in [(48, 16)] if setting.tiny else [(8192, 64), (8192, 128)]:
        blocks, tenth = s // block, max(s // block // 10, 1)
        layouts = {
            "bslongformer": bslongformer(1, blocks, block=block, num_sliding_window_blocks=2 * tenth + 1),
            "bigbird": bigbird(1, blocks, block=block, num_random_blocks=2 * tenth - 1),
        }
        for name, layout in layouts.items():
            yield from _phases(setting, f"sparse_attention, {name}", (b, heads, s, d), layout)
    yield from _chosen(setting, (b, heads, 48 if setting.tiny else 8192, 16 if setting.tiny else 64), block)


def _phases(setting: Setting, family: str, size: tuple[int, int, int, int], layout: AttentionLayout) -> Iterator[Work]:
    ours = lambda q, k, v: sparse_attention(q, k, v, layout, causal=True)
    flex = [Way("FlexAttention", by_flex(setting, layout))] if setting.device.type == "cuda" else []
    nonzeros = layout.causal().nonzeros * size[1]
    yield from _works(family, size, ours, _masked(layout), nonzeros * layout.block**2, flex)


def _chosen(setting: Setting, size: tuple[int, int, int, int], block: int) -> Iterator[Work]:
    """Yield attention over blocks that are chosen once, before anything is timed."""
    b, heads, s, d = size

    @functools.cache
    def selection() -> BlockSelection:
        draw = torch.Generator(setting.device).manual_seed(0)
        like = {"generator": draw, "device": setting.device, "dtype": BF16}
        q, k = torch.randn(2, b, heads, s, d, **like).unbind(0)
        return select_blocks(q, k, top=TOP, block=block, together=block)

    ours = lambda q, k, v: sparse_attention(q, k, v, selection(), causal=True)
    oracle = lambda q, k, v: _seen(selection(), q, k, v)
    pairs = heads * sum(min(row, TOP) + 1 for row in range(s // block)) * block**2
    yield from _works("sparse_attention, chosen", size, ours, oracle, pairs, [])


def _works(
    family: str, size: tuple[int, int, int, int], ours: Callable[..., Tensor], oracle: Callable[..., Tensor],
    pairs: int, others: list[Way],
) -> Iterator[Work]:  # fmt: skip
    b, heads, s, d = size
    ways = [Way("fds", ours), Way("torch eager", by_reference(ours)), *others]
    # all blocks: other work, whose results are not compared
    ways.append(Way("SDPA of all", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), compared=0))
    qkv = together(**{name: drawn(b, heads, s, d, dtype=BF16) for name in "qkv"})
    for phase, products in zip(PHASES, (2, 5, 7), strict=True):
        yield Work(
            family, words(b, heads, s, d), phase, qkv, ways, Way("oracle", oracle), oracle_dtype=torch.float32,
            flops=products * 2 * b * pairs * d,
        )  # fmt: skip


def by_reference(ours: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the same by torch's operators, which is what runs where no kernel does."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with only("reference"):
            return ours(q, k, v)

    return call


def by_flex(setting: Setting, layout: AttentionLayout) -> Callable[..., Tensor]:
    """Return attention by FlexAttention over the same blocks, in larger ones of which some are masked in part."""
    from torch.nn.attention.flex_attention import flex_attention

    size = max(FLEX_BLOCK, layout.block) if not setting.tiny else layout.block
    mask = to_block_mask(layout, size=size, causal=True, device=setting.device)
    compiled = setting.compiled(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def _masked(layout: AttentionLayout) -> Callable[..., Tensor]:
    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.from_numpy(layout.as_array()).to(q.device)
        seen = seen.repeat_interleave(layout.block, 1).repeat_interleave(layout.block, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.tril())

    return dense


def _seen(selection: BlockSelection, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    chosen, blocks = selection.chosen.long(), q.shape[2] // selection.block
    seen = torch.zeros(*chosen.shape[:3], blocks + 1, dtype=torch.bool, device=q.device)
    seen = seen.scatter_(3, chosen % (blocks + 1), True)[..., :blocks]  # -1, which is none, falls beyond the last
    seen = seen.repeat_interleave(selection.together, 2).repeat_interleave(selection.block, 3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.tril())
