"""Attention over the blocks that a layout or a selection lists, forward and backward, in memory of what is listed.

q (B, H, S, D), k and v (B, G, S, D), where G divides H and head h reads keys and values h // (H / G)::

    s = scale * q k^T + bias + relative_bias     -inf where masked, in no listed block, or in none that i chose
    p = exp(s - lse)      lse = log(sum_j exp(s_ij))      out = (p * keep / (1 - ratio)) v

Triton kernels (fds.kernels.sparse_forward, sparse_backward) run where they are chosen, the reference
(fds.kernels.sparse_rows) elsewhere and for the gradient of a bias. The mask `keep` of dropout is that of
`flash_attention` for the same seed: the Philox mask of (B * H * S, S).
Saves: q, k, v, masks, choices and seed as given, and in the kernels out, and lse (B, H, S) float32 in base 2.
A layout reaches an operator as a number (`AttentionLayout.key`), so that a compiled graph holds no list of indices.

Sources: Child et al. 2019, arXiv:1904.10509 (block-sparse attention); those of fds.kernels.flash.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.attention_layouts import AttentionLayout
from fds.errors import KernelError, is_a, is_int
from fds.kernels import arguments, philox, sparse_backward, sparse_forward, sparse_lists, sparse_rows
from fds.kernels.arguments import positive
from fds.kernels.block_selection import BlockSelection
from fds.kernels.choice import is_demanded, runs_triton
from fds.kernels.flash_blocks import LEAST_BIAS
from fds.kernels.language import cdiv
from fds.kernels.operators import Function, first_order

MOST_BYTES = 512  # of a row of q that fits into a block of the kernels


class _Rows(Function):
    @staticmethod
    def forward(
        q, k, v, key_padding, bias, distances, seed, documents, chosen, listed, bias_sizes, block, together, causal,
        scale, p, offset,
    ) -> Tensor:
        return sparse_rows.forward(
            q, k, v, key_padding, bias, distances, seed, documents, chosen, _key(listed), bias_sizes, block, together,
            causal, scale, p, offset,
        )

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:9])
        ctx.layout, ctx.options = inputs[9], inputs[10:]  # the layout, that it stays as long as backward needs it

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        wants = [bool(ctx.needs_input_grad[i]) for i in (4, 5)]
        dq, dk, dv, *tables = first_order(
            sparse_rows.backward, dout, *ctx.saved_tensors, _key(ctx.layout), *ctx.options, *wants
        )
        dbias, ddistances = (x if is_wanted else None for x, is_wanted in zip(tables, wants, strict=True))
        return dq, dk, dv, None, dbias, ddistances, *[None] * 11


class _Listed(Function):
    """The kernels, which have no gradient of a bias: where one requires it, the reference runs."""

    @staticmethod
    def forward(
        q, k, v, key_padding, bias, relative_bias, seed, documents, chosen, listed, block, together, causal, scale, p,
        offset,
    ) -> tuple[Tensor, Tensor]:
        return sparse_forward.forward(
            q, k, v, key_padding, bias, relative_bias, seed, documents, chosen, _key(listed), block, together, causal,
            scale, p, offset,
        )

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:9], *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # or zeros would be made for lse
        ctx.layout, ctx.options = inputs[9], inputs[10:]

    @staticmethod
    def backward(ctx, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 16
        grads = first_order(sparse_backward.backward, dout, *ctx.saved_tensors, _key(ctx.layout), *ctx.options)
        return *grads, *[None] * 13


def _key(layout: AttentionLayout | None) -> int:
    return 0 if layout is None else layout.key


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout | BlockSelection, *, causal: bool = False,
    key_padding: Tensor | None = None, bias: Tensor | None = None, relative_bias: Tensor | None = None,
    documents: Tensor | None = None, scale: float | None = None, p: float = 0.0, seed: int | Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Return softmax(scale * q k^T + bias) v, (B, H, S, D), over the blocks that are listed.

    Time and memory are those of the listed blocks, in backward too, on any device. A query that sees no key gives
    zeros, and zero gradients.

    Args:
        q: (B, H, S, D) float32, float16, bfloat16 or float64, of any strides.
        k: (B, G, S, D) of q's dtype, where G divides H: query head h reads key head h // (H / G).
        v: as k.
        layout: of H heads, or of one for all; S tokens end in its last block. Or what `select_blocks` chose.
        causal: whether a token sees none that follow it: later blocks are left out, a token's own is masked.
        key_padding: (B, S) bool, False where a key is padding.
        bias: floating, added to the scores, or bool, True where a key is seen; broadcastable to (B, H, S, S). Values
            below -1e30 mask. It gets a gradient where it requires one; that and a copy of it are as large as it is.
        relative_bias: (H, 2 S - 1) or (1, 2 S - 1) floating, with a gradient: element j - i + S - 1 of a head is
            added to the score of query i and key j. Values below -1e30 mask here as well.
        documents: (B, S) int32 or int64: a query sees the keys of the same number alone.
        scale: of the products, finite; 1 / sqrt(D) if None.
        p: probability with which dropout zeroes an attention weight; the others are divided by 1 - p.
        seed: int or () int64 tensor on q's device; dropout needs one.
        offset: index of the mask among those of one seed.

    Under autocast q, k and v are cast as by torch's attention. Raises `KernelError` for any other dtype, shape or
    device, a layout or selection of other heads or tokens, causal that is no flag, p outside [0, 1), an offset below 0,
    and dropout without a seed or in blocks that 4 does not divide.
    """
    q, k, v = arguments.as_products_cast(q, k, v)
    arguments.attention(q, k, v, key_padding, None, scale, p, documents)
    arguments.flags(causal=causal)
    if not is_int(offset, 0):
        raise KernelError("offset counts masks", where="offset", got=repr(offset)[:80], want="an int >= 0")
    if k.shape[2] != q.shape[2]:
        got = f"{k.shape[2]} keys, {q.shape[2]} queries"
        raise KernelError("sparse attention is self-attention", where="k", got=got, want="as many")
    if isinstance(layout, BlockSelection):
        layout.check(q)
        chosen, block, together, listed = layout.chosen, layout.block, layout.together, None
    else:
        _check_layout(layout, q)
        chosen, block, together, listed = None, layout.block, 0, layout
    if p and block % 4:
        raise KernelError(
            "dropout draws for 4 keys at a time", where="layout.block", got=str(block), want="a multiple of 4"
        )
    bias = None if bias is None else _check_bias(bias, q)
    relative_bias = None if relative_bias is None else _check_relative_bias(relative_bias, q)
    if not q.numel():
        return q.clone()
    seed = philox.as_seed(seed, q.device) if p else None
    k = k.view_as(k) if k is q else k  # torch.compile does not accept one tensor as two arguments
    v = v.view_as(v) if v is q or v is k else v
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if _kernel_runs(q, block, bias, relative_bias):
        q, factor = positive(q, factor)
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.zeros(bias.shape, device=q.device).masked_fill(~bias, -math.inf)
        return _Listed.apply(
            q, k, v, key_padding, bias, relative_bias, seed, documents, chosen, listed, block, together, causal,
            factor, float(p), offset,
        )[0]
    tables, bias_sizes, distances = None, [1, 1, 1, 1], None
    wide, blocks = arguments.width(q), cdiv(q.shape[2], block)
    if bias is not None:
        tables, bias_sizes = _bias_blocks(bias, wide, blocks, block)
    if relative_bias is not None:
        distances = _distance_blocks(relative_bias, wide, blocks, block)
    return _Rows.apply(
        q, k, v, key_padding, tables, distances, seed, documents, chosen, listed, bias_sizes, block, together,
        causal, factor, float(p), offset,
    )


def _kernel_runs(q: Tensor, block: int, bias: Tensor | None, relative_bias: Tensor | None) -> bool:
    """Return whether the kernels, not the reference, run; raises where only they may and cannot."""
    if not runs_triton("sparse_attention", q):
        return False
    biases = {"bias": bias, "relative_bias": relative_bias}
    wants = [name for name, x in biases.items() if x is not None and x.requires_grad]
    is_too_wide = q.shape[3] * q.element_size() > MOST_BYTES
    obstacles = [f"a gradient of {name}" for name in wants] + [f"{q.shape[3]} columns"] * is_too_wide
    obstacles += [f"blocks of {block} tokens"] * (block not in sparse_lists.BLOCKS)
    if obstacles and is_demanded():
        raise KernelError(
            "the kernels do not take all of this", where="kernels.only('triton')", got=", ".join(obstacles),
            want=f"blocks of 16, 32, 64 or 128 tokens, {MOST_BYTES // q.element_size()} columns, a constant bias",
            hint="references take it: leave only('triton') out, or take prefer_triton()",
        )
    return not obstacles


def _check_layout(layout: AttentionLayout, q: Tensor) -> None:
    """Raise `KernelError` where a layout does not fit q."""
    (_, heads, tokens, _), want = q.shape, "an AttentionLayout, or a BlockSelection"
    if not is_a(layout, AttentionLayout):
        hint = "AttentionLayout.from_dense(array, block=) makes one of DeepSpeed's"
        raise KernelError("not a layout", where="layout", got=type(layout).__name__, want=want, hint=hint)
    if layout.num_heads not in (1, heads) or heads == 0:
        raise KernelError(
            "the layout has other heads than q", where="layout", got=f"{layout.num_heads} heads of the layout",
            want=f"{heads}, as q has, or 1",
        )
    if not layout.tokens - layout.block < tokens <= layout.tokens:
        blocks = -(-tokens // layout.block)
        shorter = f"layout.cropped({blocks})" if blocks < layout.blocks else "a layout of more blocks"
        raise KernelError(
            "the layout is of another length than q", where="layout", got=f"{layout!r}, {tokens} tokens",
            want=f"{blocks} blocks of {layout.block} tokens", hint=shorter,
        )


def _check_bias(bias: Tensor, q: Tensor) -> Tensor:
    scores = (*q.shape[:3], q.shape[2])
    is_mask = isinstance(bias, Tensor) and bias.dtype == torch.bool
    arguments.floating(q=q, bias=None if is_mask and bias.device == q.device else bias)
    if bias.dim() > 4 or any(x not in (1, y) for x, y in zip(bias.shape[::-1], scores[::-1], strict=False)):
        raise KernelError(
            "bias does not broadcast to the scores", where="bias", got=str(tuple(bias.shape)),
            want=f"broadcastable to (B, H, S, S) = {scores}",
        )
    return bias


def _check_relative_bias(relative_bias: Tensor, q: Tensor) -> Tensor:
    arguments.floating(q=q, relative_bias=relative_bias)
    width = 2 * q.shape[2] - 1
    if tuple(relative_bias.shape) not in ((q.shape[1], width), (1, width)):
        raise KernelError(
            "relative_bias has another shape", where="relative_bias", got=str(tuple(relative_bias.shape)),
            want=f"(H, 2 S - 1) = {(q.shape[1], width)}, or (1, {width})",
        )
    return relative_bias.masked_fill(relative_bias < LEAST_BIAS, -math.inf)


def _bias_blocks(bias: Tensor, wide: torch.dtype, blocks: int, block: int) -> tuple[Tensor, list[int]]:
    """Return the blocks of a bias (x, rows, columns), -inf where it masks, and how many there are of each dimension."""
    bias = bias[(None,) * (4 - bias.dim())]
    if bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, dtype=wide, device=bias.device).masked_fill(~bias, -math.inf)
    else:
        bias = bias.to(wide).masked_fill(bias < LEAST_BIAS, -math.inf)
    b, h, *ends = bias.shape
    counts = [1 if n == 1 else blocks for n in ends]
    sides = [1 if n == 1 else block for n in ends]
    missing = [count * side - n for count, side, n in zip(counts, sides, ends, strict=True)]
    bias = F.pad(bias, (0, missing[1], 0, missing[0])) if any(missing) else bias
    bias = bias.reshape(b, h, counts[0], sides[0], counts[1], sides[1]).transpose(3, 4)
    return bias.reshape(-1, *sides), [b, h, *counts]


def _distance_blocks(relative_bias: Tensor, wide: torch.dtype, blocks: int, block: int) -> Tensor:
    """Return the bias (heads * (2 blocks - 1), block, block) of blocks that lie -(blocks - 1), ... blocks - 1 apart."""
    token = torch.arange(block, device=relative_bias.device)
    apart = torch.arange(1 - blocks, blocks, device=relative_bias.device) * block
    distance = apart[:, None, None] + token - token[:, None]
    middle = relative_bias.shape[1] // 2
    at = (distance + middle).clamp(0, 2 * middle)  # beyond the last token nothing is seen
    return relative_bias.to(wide)[:, at].flatten(0, 1)
