"""Attention of which each rank of a sequence axis has some tokens; on one rank it is `fds.kernels.attention`.

    out = softmax(scale * q k^T) v,  masked, over the tokens of all ranks        q, k, v and out: this rank's tokens

Two methods compute it: `ulysses` (fds/nn/parallel/ulysses.py) exchanges heads for tokens, and sends little; `ring`
(fds/nn/parallel/ring.py) passes keys and values around while it computes, with any number of heads. docs/sequence.md
compares them.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from fds import kernels
from fds.collectives import Axis
from fds.errors import KernelError, is_a, is_int
from fds.kernels import arguments
from fds.kernels.arguments import attention as check, positive
from fds.loss import current_mode
from fds.loss.compiled import untraced
from fds.nn.parallel import checking, tokens
from fds.nn.parallel.ring import ring_attention
from fds.nn.parallel.ulysses import ulysses_attention
from fds.nn.parallel.zigzag import LAYOUTS, Layout

Method = Literal["ulysses", "ring"]
METHODS = {"ulysses": ulysses_attention, "ring": ring_attention}


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, axis: Axis | None = None, method: Method = "ulysses",
    layout: Layout = "contiguous", causal: bool = False, key_padding: Tensor | None = None, bias: Tensor | None = None,
    scale: float | None = None, p: float = 0.0, seed: int | Tensor | None = None, offset: int = 0,
) -> Tensor:  # fmt: skip
    """Return this rank's part of softmax(scale * q k^T) v over the tokens of all ranks, (B, H, S/N, D).

    Without an axis, or on one of a single rank, it is `fds.kernels.attention` with all of its arguments. All ranks of
    the axis call it, with as many tokens each; padding that `key_padding` masks makes up the number.

    Args:
        q: (B, H, S/N, D), the queries of this rank's tokens: float32, float16, bfloat16 or float64.
        k: (B, G, S/N, D) of q's dtype, where G divides H: query head h reads key head h // (H / G).
        v: as k.
        axis: of `fds.mesh`, N ranks in the order of their parts; None for one rank.
        method: "ulysses", for which N divides H, or "ring".
        layout: which tokens a rank has: "contiguous", the r-th of N equal parts, or "zigzag", those of `fds.nn.zigzag`,
            with which the ranks of a causal ring have equal work.
        causal: a query sees the keys up to its own position in the whole sequence.
        key_padding: (B, S/N) bool, False where a key of this rank is padding. A query that sees no key gives zeros.
        bias: as of `fds.kernels.attention`, on one rank alone.
        scale: of the products; 1 / sqrt(D) if None.
        p: of dropout, on one rank alone.
        seed: of dropout.
        offset: of dropout.

    Raises `KernelError` for what `fds.kernels.attention` refuses, an unknown method or layout, another axis or layout
    than `fds.context_parallel` has, a bias or dropout over several ranks, and numbers of heads or tokens that do not
    divide; `MeshError` for an axis of ranks that do not run.
    """
    _check_names(axis, method, layout)
    checking.flags("attention", KernelError, causal=causal)
    _check_draws(seed, offset)
    if axis is None or axis.size == 1:
        return kernels.attention(
            q, k, v, causal=causal, key_padding=key_padding, bias=bias, scale=scale, p=p, seed=seed, offset=offset
        )
    options = {"causal": causal, "key_padding": key_padding, "bias": bias, "scale": scale, "p": p}
    return _over_ranks(q, k, v, axis, method, layout, **options)


@untraced("fds.nn.attention meets other ranks; fds.compile(fullgraph=False) lets it run uncompiled")
def _over_ranks(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, method: Method, layout: Layout, *, causal: bool,
    key_padding: Tensor | None, bias: Tensor | None, scale: float | None, p: float,
) -> Tensor:  # fmt: skip
    """Return attention over several ranks."""
    axis.check_current()
    q, k, v = arguments.as_products_cast(q, k, v)
    check(q, k, v, key_padding, bias, scale, p)
    _check_parts(q, k, axis, layout, bias, p)
    q, scale = positive(q, max(q.shape[3], 1) ** -0.5 if scale is None else scale)
    out = METHODS[method](q, k, v, axis, causal=causal, key_padding=key_padding, scale=scale, layout=layout)
    if (draws := tokens.now()) is not None and draws.watch is not None:
        draws.watch.mark(out, -2)
    return out


def _check_names(axis: Any, method: Any, layout: Any) -> None:
    """Raise `KernelError` for what is not an axis, a method or a layout."""
    if axis is not None and not is_a(axis, Axis):
        raise KernelError(
            "axis is not an axis", where="attention", got=repr(axis)[:80], want='fds.mesh(sp=-1)["sp"], or None'
        )
    for name, value, known in (("method", method, tuple(METHODS)), ("layout", layout, LAYOUTS)):
        if value not in known:
            want = " or ".join(map(repr, known))
            raise KernelError(f"no such {name}", where="attention", got=repr(value)[:80], want=want)


def _check_draws(seed: Any, offset: Any) -> None:
    """Raise `KernelError` for what dropout cannot be drawn by."""
    if not (seed is None or is_int(seed) or is_a(seed, Tensor)):
        raise KernelError("attention: seed is not a seed", where="seed", got=repr(seed)[:80], want="an int or a tensor")
    if not is_int(offset, 0):
        raise KernelError("attention: offset counts rows", where="offset", got=repr(offset)[:80], want="an int >= 0")


def _check_parts(q: Tensor, k: Tensor, axis: Axis, layout: Layout, bias: Tensor | None, p: float) -> None:
    """Raise `KernelError` for parts that several ranks cannot have, and what they cannot compute."""
    where = f"attention over axis {axis.name!r}, {axis.size} ranks"
    if bias is not None or p:
        raise KernelError(
            "attention over several ranks takes neither a bias nor dropout",
            where=where,
            got="a bias" if bias is not None else f"p={p}",
            want="causal and key_padding alone",
            hint="dropout of what attention returns regularizes too" if bias is None else "",
        )
    if k.shape[2] != q.shape[2]:
        raise KernelError(
            "queries and keys are not of the same tokens",
            where=where,
            got=f"{q.shape[2]} queries, {k.shape[2]} keys",
            want="as many, on every rank",
        )
    draws, mode = tokens.now(), current_mode()
    in_step = mode.evaluating or mode.busy is not None
    if (draws is None and in_step) or (draws is not None and draws.parts.axis.ranks != axis.ranks):
        raise KernelError(
            "attention is over other ranks than those that pass parts of the same rows",
            where=where,
            got="none of them" if draws is None else f"{draws.parts.axis.name!r}, {draws.parts.axis.size} ranks",
            want=f"fds.context_parallel of axis {axis.name!r} in the composition",
        )
    if draws is not None and draws.parts.layout != layout:
        raise KernelError(
            "a rank's tokens are laid out in one way for attention, and in another for the step",
            where=where,
            got=f"layout={layout!r}",
            want=f"{draws.parts.layout!r}, as context_parallel is told",
            hint=f"or fds.context_parallel(axis, layout={layout!r})",
        )
    if layout == "zigzag" and q.shape[2] % 2:
        raise KernelError(
            "a rank's part in zig-zag order is two chunks",
            where=where,
            got=f"{q.shape[2]} tokens",
            want="an even number: fds.nn.zigzag(whole, axis)",
        )
