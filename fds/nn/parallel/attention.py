"""Attention of which each rank of a sequence axis has some tokens; on one rank it is `fds.kernels.attention`.

    out = softmax(scale * q k^T) v,  masked, over the tokens of all ranks        q, k, v and out: this rank's tokens

Two methods compute it: `ulysses_attention` exchanges heads for tokens, and sends little; `ring_attention` passes keys
and values around while it computes, with any number of heads. docs/sequence.md compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from fds import kernels
from fds.collectives import Axis, all_gather, all_to_all
from fds.collectives.links import Work
from fds.errors import KernelError, is_a, is_int
from fds.kernels import arguments, attention_blocks as blocks, partial_attention as partial
from fds.kernels.arguments import attention as check, positive
from fds.kernels.operators import Function, first_order
from fds.kernels.scaled_dot_product import check_window
from fds.loss import current_mode
from fds.loss.compiled import untraced
from fds.nn.parallel import checking, tokens
from fds.nn.parallel.zigzag import LAYOUTS, Layout, in_order, in_zigzag

EVERY = slice(None)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, *, causal: bool, key_padding: Tensor | None,
    documents: Tensor | None, scale: float, layout: Layout, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Return this rank's part of attention, (B, H, S/N, D), by passing keys and values around a ring of ranks.

    Each of N ranks has S / N tokens. It computes attention of its queries over its keys while these are on their way to
    the next rank, then over those that came from the rank before, and so on for N steps;
    `fds.kernels.partial_attention` says how the parts are merged, in float32. Backward goes around once more:
    gradients of keys and values travel with them, and one step further, home.

    What is masked as a whole is not computed. With `causal` and contiguous parts that is nearly half, but the last rank
    has none of it and all wait for that rank; with the zig-zag order (`fds.nn.zigzag`) each rank has half::

        keys of            this rank      an earlier one             a later one
        contiguous         causal         all                        none
        zig-zag            causal         all x their first chunk    second chunk x all

    Sends: per rank (N - 1) 2 B G S/N D elements forward; backward as much, and N times 2 B G S/N D gradients in
    float32.
    Keeps: q, k, v and out of this rank's tokens, and lse (B, H, S/N) float32; other ranks' k and v only while it runs.
    Sources: Liu et al. 2023, arXiv:2310.01889; Dao et al. 2022, arXiv:2205.14135 (partial results).
    """
    key_padding, documents = _of_all(key_padding, axis), _of_all(documents, axis)
    if window is not None and layout == "zigzag":
        raise KernelError(
            "a ring has no windows over a rank's two chunks",
            where=f"window, axis {axis.name!r}",
            got=f"window={window}, layout={layout!r}",
            want='method="ulysses", or layout="contiguous"',
        )
    return _Ring.apply(q, k, v, key_padding, documents, axis.used_for("attention"), causal, scale, layout, window)[0]


def _of_all(x: Tensor | None, axis: Axis) -> Tensor | None:
    """Return a mask (B, S/N) of this rank's tokens, or their documents, of the tokens of all ranks, (B, S)."""
    if x is None:
        return None
    if x.dtype == torch.bool:
        return all_gather(x.view(torch.uint8), axis, 1).view(torch.bool)
    return all_gather(x.contiguous(), axis, 1)


def seen_part(source: int, axis: Axis, length: int, causal: bool, layout: Layout) -> tuple[slice, slice, bool] | None:
    """Return which of this rank's queries see which keys of `source`, and whether causally; None where none do.

    `length` is the tokens of a rank.
    """
    if not causal or source == axis.index:
        return EVERY, EVERY, causal
    half, is_earlier = length // 2, source < axis.index
    if layout == "zigzag":
        return (EVERY, slice(half), False) if is_earlier else (slice(half, None), EVERY, False)
    return (EVERY, EVERY, False) if is_earlier else None


class _Ring(Function):
    @staticmethod
    def forward(q, k, v, key_padding, documents, axis, causal, scale, layout, window) -> tuple[Tensor, Tensor]:
        b, h, s, d = q.shape
        out = q.new_zeros((b, s, h, d), dtype=arguments.width(q)).transpose(1, 2)  # merging heads makes no copy
        lse = torch.full((b, h, s), -torch.inf, dtype=out.dtype, device=q.device)
        for source, pair in _pass_around(torch.stack([k, v]), axis):
            if seen := seen_part(source, axis, s, causal, layout):
                rows, keys, is_causal = seen
                mask = _mask(key_padding, documents, axis.index, rows, source, keys, s, is_causal, window)
                k_s, v_s = pair[:, :, :, keys]
                part = blocks.forward(q[:, :, rows], k_s, v_s, mask, scale)
                partial.merge(out[:, :, rows], lse[:, :, rows], *part)
        return out.to(q.dtype), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:5], *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # or zeros would be made for lse
        ctx.options = inputs[5:]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 10
        return *first_order(_Gradients(*ctx.options), dout, *ctx.saved_tensors), *[None] * 7


@attrs.frozen
class _Gradients:
    """The backward pass, in the form in which `first_order` takes one."""

    axis: Axis
    causal: bool
    scale: float
    layout: Layout
    window: int | None
    name: str = "ring_attention_backward"

    def __call__(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, documents: Tensor | None,
        out: Tensor, lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return dq, dk and dv."""
        s = q.shape[2]
        dq, late = torch.zeros_like(q, dtype=lse.dtype), None
        for source, pair in _pass_around(torch.stack([k, v]), self.axis):
            grads = torch.zeros_like(pair, dtype=lse.dtype)
            if seen := seen_part(source, self.axis, s, self.causal, self.layout):
                rows, keys, is_causal = seen
                index = self.axis.index
                mask = _mask(key_padding, documents, index, rows, source, keys, s, is_causal, self.window)
                dout_s, q_s, out_s, lse_s = (x[:, :, rows] for x in (dout, q, out, lse))
                k_s, v_s = pair[:, :, :, keys]
                dq_s, dk, dv = blocks.backward(dout_s, q_s, k_s, v_s, out_s, lse_s, mask, self.scale)
                dq[:, :, rows] += dq_s
                grads[0][:, :, keys], grads[1][:, :, keys] = dk, dv
            if late is not None:  # of the same keys, from the ranks before
                grads += late.wait()
            late = _Passed.on(grads, self.axis)
        assert late is not None
        dk, dv = late.wait().to(k.dtype)
        return dq.to(q.dtype), dk, dv


def _pass_around(x: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield every rank's `x`, this rank's first and then those of the ranks before, with the rank.

    Each is passed on while the caller works with it.
    """
    for step in range(axis.size):
        passed = _Passed.on(x, axis) if step + 1 < axis.size else None
        yield (axis.index - step) % axis.size, x
        if passed is not None:
            x = passed.wait()


@attrs.frozen
class _Passed:
    """A tensor on its way to the next rank, and one of the same shape that comes from the rank before."""

    works: tuple[Work, Work]
    x: Tensor

    @classmethod
    def on(cls, x: Tensor, axis: Axis) -> _Passed:
        """Start to send a contiguous tensor, and to receive one."""
        n, received = axis.size, torch.empty_like(x)
        if axis.index % 2:  # or on two ranks of NCCL both would send first, and neither receive
            before = axis.start_recv(received, (axis.index - 1) % n)
            return cls((before, axis.start_send(x, (axis.index + 1) % n)), received)
        sent = axis.start_send(x, (axis.index + 1) % n)
        return cls((sent, axis.start_recv(received, (axis.index - 1) % n)), received)

    def wait(self) -> Tensor:
        """Return what came."""
        for work in self.works:
            work.wait()
        return self.x


def _mask(
    key_padding: Tensor | None, documents: Tensor | None, index: int, rows: slice, source: int, keys: slice,
    length: int, causal: bool, window: int | None,
) -> blocks.Mask:  # fmt: skip
    """Return which of these keys of a rank these queries of another see, of masks of the whole sequence."""

    def of(x: Tensor, rank: int, tokens: slice) -> Tensor:
        return x[:, rank * length : (rank + 1) * length][:, tokens]

    return blocks.Mask(
        causal,
        None if key_padding is None else of(key_padding, source, keys),
        None if documents is None else (of(documents, index, rows), of(documents, source, keys)),
        window,
        0 if window is None else (index - source) * length,
    )


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, *, causal: bool, key_padding: Tensor | None,
    documents: Tensor | None, scale: float | None, layout: Layout, compute: Callable[..., Tensor] = kernels.attention,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Return this rank's part of attention, (B, H, S/N, D), by exchanging heads for tokens: DeepSpeed-Ulysses.

    Each of N ranks has S / N tokens of all heads; one all-to-all gives it all S tokens of H / N heads, attention runs
    as on one rank, and another all-to-all gives the result back::

        q, k, v (B, H + 2K, S/N, D) -> (B, (H + 2K)/N, S, D) -> out (B, H/N, S, D) -> (B, H, S/N, D)

    K is the number of heads of keys G where N divides it, else the least common multiple of both: heads are repeated
    for the ranks that read the same.

    Sends: (N - 1) / N of B S/N D (2H + 2K) elements forward, as much backward, in two messages each.
    Keeps: q, k, v and out of H / N heads for all tokens: as many elements as of one rank's H heads for S / N tokens.
    Source: Jacobs et al. 2023, arXiv:2309.14509, section 3. `compute` is attention on one rank.

    Raises `KernelError` where the ranks do not divide the heads of q.
    """
    n, heads = axis.size, q.shape[1]
    if heads % n:
        raise KernelError(
            "each rank computes as many heads",
            where=f"q, axis {axis.name!r}",
            got=f"{heads} heads on {n} ranks",
            want=f"a multiple of {n} heads",
            hint='method="ring" takes any number of them' * (compute is kernels.attention),
        )
    k, v = (x.repeat_interleave(math.lcm(x.shape[1], n) // x.shape[1], dim=1) for x in (k, v))
    counts = heads // n, k.shape[1] // n, v.shape[1] // n  # heads of this rank
    sent = torch.cat([x.unflatten(1, (n, -1)) for x in (q, k, v)], 2).flatten(1, 2)
    whole = all_to_all(sent, axis, split_dim=1, concat_dim=2)
    masks = {"key_padding": _of_all(key_padding, axis), "documents": _of_all(documents, axis)}
    # without a mask of positions any order is right
    reorders = layout == "zigzag" and causal
    more = {} if window is None else {"window": window}
    if reorders:
        whole = in_order(whole, n, 2)
        masks = {name: None if x is None else in_order(x, n, 1) for name, x in masks.items()}
    out = compute(*whole.split_with_sizes(counts, 1), causal=causal, scale=scale, **masks, **more)
    out = in_zigzag(out, n, 2) if reorders else out
    return all_to_all(out, axis, split_dim=2, concat_dim=1)


Method = Literal["ulysses", "ring"]
METHODS = {"ulysses": ulysses_attention, "ring": ring_attention}


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, axis: Axis | None = None, method: Method = "ulysses",
    layout: Layout = "contiguous", causal: bool = False, key_padding: Tensor | None = None,
    documents: Tensor | None = None, window: int | None = None, bias: Tensor | None = None,
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
        documents: (B, S/N) int32 or int64, in which document a token lies, where rows are packed of several: a query
            sees the keys of the same number, of any rank.
        window: with `causal`, a query sees its own key and window - 1 before it, of the whole sequence; a ring takes it
            in contiguous parts.
        bias: as of `fds.kernels.attention`, on one rank alone.
        scale: of the products; 1 / sqrt(D) if None.
        p: of dropout, on one rank alone.
        seed: of dropout.
        offset: of dropout.

    Raises `KernelError` for what `fds.kernels.attention` refuses, an unknown method or layout, another axis or layout
    than `fds.context_parallel` has, a bias or dropout over several ranks, and numbers of heads or tokens that do not
    divide; `MeshError` for an axis of ranks that do not run.
    """
    check_names(axis, method, layout)
    checking.flags("attention", KernelError, causal=causal)
    check_draws(seed, offset)
    if axis is None or axis.size == 1:
        return kernels.attention(
            q, k, v, causal=causal, key_padding=key_padding, documents=documents, window=window, bias=bias, scale=scale,
            p=p, seed=seed, offset=offset,
        )  # fmt: skip
    masks = {"key_padding": key_padding, "documents": documents, "bias": bias}
    return _over_ranks(q, k, v, axis, method, layout, causal=causal, scale=scale, p=p, window=window, **masks)


@untraced("fds.nn.attention meets other ranks; fds.compile(fullgraph=False) lets it run uncompiled")
def _over_ranks(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, method: Method, layout: Layout, *, causal: bool,
    key_padding: Tensor | None, documents: Tensor | None, bias: Tensor | None, scale: float | None, p: float,
    window: int | None,
) -> Tensor:  # fmt: skip
    """Return attention over several ranks."""
    axis.check_current()
    q, k, v = arguments.as_products_cast(q, k, v)
    check(q, k, v, key_padding, bias, scale, p, documents)
    check_parts(q, k, axis, layout, bias, p)
    if window is not None:
        check_window(window, causal, bias, p)
    q, scale = positive(q, max(q.shape[3], 1) ** -0.5 if scale is None else scale)
    masks, order = {"key_padding": key_padding, "documents": documents}, {"causal": causal, "layout": layout}
    out = METHODS[method](q, k, v, axis, scale=scale, window=window, **order, **masks)
    if (draws := tokens.now()) is not None and draws.watch is not None:
        draws.watch.mark(out, -2)
    return out


def document_mask(documents: Tensor, *, causal: bool = True, dtype: torch.dtype | None = None) -> Tensor:
    """Return which tokens of packed rows see which, (B, 1, S, S): for attention that takes a mask alone.

    `torch.nn.functional.scaled_dot_product_attention` takes it as `attn_mask`, models of transformers as
    `attention_mask`; `fds.nn.attention(documents=)` needs no mask of that size. The eager attention of transformers
    adds its mask, whatever that is, to the scores: give it one of floats.

    Args:
        documents: (B, S) int32 or int64, in which document a token lies.
        causal: a token sees those before it and itself alone.
        dtype: None for bool, True where a token sees another; or of floats that are added to scores, 0 there and the
            least number elsewhere.

    Raises `KernelError` for other documents, and a dtype that is not floating.

    >>> document_mask(torch.tensor([[0, 0, 1]])).int()[0, 0].tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    checking.flags("document_mask", KernelError, causal=causal)
    arguments.check_documents(documents)
    same = (documents[:, :, None] == documents[:, None, :])[:, None]
    seen = same.tril() if causal else same
    if dtype is None or dtype == torch.bool:
        return seen
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise KernelError("not a dtype of scores", where="dtype", got=repr(dtype)[:60], want="a floating one, or None")
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


def check_names(axis: Any, method: Any, layout: Any) -> None:
    """Raise `KernelError` for what is not an axis, a method or a layout."""
    if axis is not None and not is_a(axis, Axis):
        raise KernelError(
            "axis is not an axis", where="attention", got=repr(axis)[:80], want='fds.mesh(sp=-1)["sp"], or None'
        )
    for name, value, choices in (("method", method, tuple(METHODS)), ("layout", layout, LAYOUTS)):
        if value not in choices:
            want = " or ".join(map(repr, choices))
            raise KernelError(f"no such {name}", where="attention", got=repr(value)[:80], want=want)


def check_draws(seed: Any, offset: Any) -> None:
    """Raise `KernelError` for what dropout cannot be drawn by."""
    if not (seed is None or is_int(seed) or is_a(seed, Tensor)):
        raise KernelError("attention: seed is not a seed", where="seed", got=repr(seed)[:80], want="an int or a tensor")
    if not is_int(offset, 0):
        raise KernelError("attention: offset counts rows", where="offset", got=repr(offset)[:80], want="an int >= 0")


def check_parts(q: Tensor, k: Tensor, axis: Axis, layout: Layout, bias: Tensor | None, p: float) -> None:
    """Raise `KernelError` for parts that several ranks cannot have, and what they cannot compute."""
    where = f"attention over axis {axis.name!r}, {axis.size} ranks"
    if bias is not None or p:
        raise KernelError(
            "attention over several ranks takes neither a bias nor dropout",
            where=where,
            got="a bias" if bias is not None else f"p={p}",
            want="causal, key_padding and documents alone",
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
