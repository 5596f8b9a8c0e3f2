"""Sparse attention of which each rank has some of the heads, or some of the tokens, by a layout of all of them.

    out = softmax(scale * q k^T + bias) v  over the blocks that are listed, of the tokens of all ranks

On one rank it is `fds.kernels.sparse_attention`. A layout is made on the host, alike on every rank, and each takes the
patterns of its heads.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from fds import kernels
from fds.attention_layouts import AttentionLayout, LayoutByLength
from fds.collectives import Axis
from fds.errors import KernelError, is_a
from fds.kernels import arguments
from fds.kernels.arguments import attention as check, positive
from fds.loss.compiled import untraced
from fds.nn.parallel import checking, tokens
from fds.nn.parallel.attention import Method, check_draws, check_names, check_parts, ulysses_attention
from fds.nn.parallel.region import heads_around


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout | LayoutByLength, *, axis: Axis | None = None,
    method: Method = "ulysses", causal: bool = False, key_padding: Tensor | None = None, bias: Tensor | None = None,
    relative_bias: Tensor | None = None, documents: Tensor | None = None, scale: float | None = None, p: float = 0.0,
    seed: int | Tensor | None = None, offset: int = 0,
) -> Tensor:  # fmt: skip
    """Return this rank's part of softmax(scale * q k^T + bias) v over the blocks that a layout lists, (B, H, S/N, D).

    In a module that a plan of `fds.tensor_parallel` calls "heads", H are this rank's heads, and those of the layout are
    all heads. Over an axis of N ranks, each of which has S/N tokens, ranks exchange heads for tokens, as
    `fds.nn.attention` does by Ulysses, and each has the patterns of H/N heads.

    Args:
        q: (B, H, S/N, D) float32, float16, bfloat16 or float64.
        k: (B, G, S/N, D) of q's dtype, where G divides H: query head h reads key head h // (H / G).
        v: as k.
        layout: of all heads, or of one for all, and of all S tokens; or layouts by length, of which one is taken.
        axis: of `fds.mesh`, N ranks in the order of their parts; None for one rank.
        method: "ulysses", for which N divides H.
        causal: whether a token sees none that follow it in the whole sequence.
        key_padding: (B, S/N) bool, False where a key of this rank is padding. A query that sees no key gives zeros.
        bias: as of `fds.kernels.sparse_attention`, of this rank's heads, on an axis of one rank alone.
        relative_bias: likewise, (H, 2 S - 1) or (1, 2 S - 1).
        documents: (B, S/N) int32 or int64: a query sees the keys of the same number alone, of any rank.
        scale: of the products; 1 / sqrt(D) if None.
        p: of dropout, where a rank has all heads and tokens.
        seed: of dropout.
        offset: of dropout.

    Raises `KernelError` for what `fds.kernels.sparse_attention` refuses; a ring, whose ranks would compute blocks that
    are not listed; another axis than `fds.context_parallel` has, or its zig-zag order; over several ranks a bias and
    dropout, and heads that these do not divide; `AttentionLayoutError` for a layout of other heads or tokens.
    """
    check_names(axis, method, "contiguous")
    checking.flags("sparse_attention", KernelError, causal=causal)
    check_draws(seed, offset)
    if method == "ring":
        raise KernelError(
            "a ring computes what is not listed: it passes keys of all heads around",
            where="sparse_attention",
            got="method='ring'",
            want="method='ulysses'",
        )
    arguments.required(q=q, k=k, v=v)
    check(*arguments.as_products_cast(q, k, v), key_padding=None, bias=None, scale=scale, p=p)
    layout = _of_these_heads(layout, q, axis, p)
    if axis is None or axis.size == 1:
        tokens.check_alone(q, k)
        return kernels.sparse_attention(
            q, k, v, layout, causal=causal, key_padding=key_padding, bias=bias, relative_bias=relative_bias,
            documents=documents, scale=scale, p=p, seed=seed, offset=offset,
        )  # fmt: skip
    bias = relative_bias if bias is None else bias
    masks = {"key_padding": key_padding, "documents": documents}
    return _over_ranks(q, k, v, axis, layout, causal=causal, scale=scale, p=p, bias=bias, **masks)


def _of_these_heads(layout: Any, q: Tensor, axis: Axis | None, p: float) -> AttentionLayout:
    """Return the layout of the heads that this rank computes, of the tokens of all ranks of an axis."""
    region, heads = heads_around(), q.shape[1]
    parts, size = 1 if region is None else region.axis.size, 1 if axis is None else axis.size
    if p and parts > 1:
        raise KernelError(
            "weights of sparse attention are dropped for some of the heads, and others than one rank would drop",
            where="sparse_attention, in a module that tensor_parallel divides by heads",
            got=f"p={p}, {heads} heads on each of {parts} ranks",
            want="none, and dropout of what attention returns",
        )
    if is_a(layout, AttentionLayout) and parts == size == 1:
        return layout
    if is_a(layout, AttentionLayout) and layout.tokens - layout.block < q.shape[2] * size <= layout.tokens:
        layout = LayoutByLength(layout)
    if not is_a(layout, LayoutByLength):
        raise KernelError(
            "not a layout of all tokens",
            where="layout",
            got=repr(layout)[:80],
            want=f"an AttentionLayout of {q.shape[2] * size} tokens, or a LayoutByLength of fds.attention_layouts",
            hint="LayoutByLength(bigbird)",
        )
    first = 0 if region is None else region.axis.index * heads
    count = heads if heads % size else heads // size  # ranks that do not divide them are refused when they meet
    return layout.at(heads * parts, q.shape[2] * size, first + (0 if axis is None else axis.index * count), count)


@untraced("fds.nn.sparse_attention meets other ranks; fds.compile(fullgraph=False) lets it run uncompiled")
def _over_ranks(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, layout: AttentionLayout, *, causal: bool, scale: float | None,
    p: float, bias: Tensor | None, key_padding: Tensor | None, documents: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return attention over several ranks."""
    axis.check_current()
    q, k, v = arguments.as_products_cast(q, k, v)
    check(q, k, v, key_padding, None, scale, p, documents)
    check_parts(q, k, axis, "contiguous", bias, p)
    q, scale = positive(q, max(q.shape[3], 1) ** -0.5 if scale is None else scale)
    out = ulysses_attention(
        q, k, v, axis, causal=causal, key_padding=key_padding, documents=documents, scale=scale, layout="contiguous",
        compute=functools.partial(kernels.sparse_attention, layout=layout),
    )  # fmt: skip
    if (draws := tokens.now()) is not None and draws.watch is not None:
        draws.watch.mark(out, -2)
    return out
