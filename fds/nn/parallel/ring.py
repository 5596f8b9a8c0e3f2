"""Attention over a sequence axis by passing keys and values around a ring of ranks.

Each of N ranks has S / N tokens. It computes attention of its queries over its keys while these are on their way to the
next rank, then over those that came from the rank before, and so on for N steps; `fds.kernels.partial_attention` says
how the parts are merged, in float32. Backward goes around once more: gradients of keys and values travel with them, and
one step further, home.

What is masked as a whole is not computed. With `causal` and contiguous parts that is nearly half, but the last rank has
none of it and all wait for that rank; with the zig-zag order (`fds.nn.zigzag`) each rank has half::

    keys of            this rank      an earlier one             a later one
    contiguous         causal         all                        none
    zig-zag            causal         all x their first chunk    second chunk x all

Sends: per rank (N - 1) 2 B G S/N D elements forward; backward as much, and N times 2 B G S/N D gradients in float32.
Keeps: q, k, v and out of this rank's tokens, and lse (B, H, S/N) float32; other ranks' k and v only while it runs.
Sources: Liu et al. 2023, arXiv:2310.01889; Dao et al. 2022, arXiv:2205.14135 (partial results).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.collectives import Axis, all_gather
from fds.collectives.links import Work
from fds.kernels import arguments, partial_attention as partial
from fds.kernels.operators import Function, first_order
from fds.nn.parallel.zigzag import Layout

EVERY = slice(None)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, *, causal: bool, key_padding: Tensor | None, scale: float,
    layout: Layout,
) -> Tensor:  # fmt: skip
    """Return this rank's part of attention over the whole sequence, (B, H, S/N, D); see `fds.nn.attention`."""
    if key_padding is not None:
        key_padding = all_gather(key_padding.view(torch.uint8), axis, 1).view(torch.bool)
    return _Ring.apply(q, k, v, key_padding, axis.used_for("attention"), causal, scale, layout)[0]


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
    def forward(q, k, v, key_padding, axis, causal, scale, layout) -> tuple[Tensor, Tensor]:
        b, h, s, d = q.shape
        out = q.new_zeros((b, s, h, d), dtype=arguments.width(q)).transpose(1, 2)  # merging heads makes no copy
        lse = torch.full((b, h, s), -torch.inf, dtype=out.dtype, device=q.device)
        for source, pair in _around(torch.stack([k, v]), axis):
            if seen := seen_part(source, axis, s, causal, layout):
                rows, keys, is_causal = seen
                own, mask = q[:, :, rows], _of_keys(key_padding, source, s, keys)
                found = partial.forward(own, *pair[:, :, :, keys], causal=is_causal, key_padding=mask, scale=scale)
                partial.merge(out[:, :, rows], lse[:, :, rows], *found)
        return out.to(q.dtype), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:4], *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # or zeros would be made for lse
        ctx.options = inputs[4:]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 8
        return *first_order(_Gradients(*ctx.options), dout, *ctx.saved_tensors), *[None] * 5


@attrs.frozen
class _Gradients:
    """The backward pass, in the form in which `first_order` takes one."""

    axis: Axis
    causal: bool
    scale: float
    layout: Layout
    name: str = "ring_attention_backward"

    def __call__(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk and dv."""
        s = q.shape[2]
        dq, late = torch.zeros_like(q, dtype=lse.dtype), None
        for source, pair in _around(torch.stack([k, v]), self.axis):
            grads = torch.zeros_like(pair, dtype=lse.dtype)
            if seen := seen_part(source, self.axis, s, self.causal, self.layout):
                rows, keys, is_causal = seen
                mask, (k_s, v_s) = _of_keys(key_padding, source, s, keys), pair[:, :, :, keys]
                dout_s, q_s, out_s, lse_s = (x[:, :, rows] for x in (dout, q, out, lse))
                dq_s, dk, dv = partial.backward(
                    dout_s, q_s, k_s, v_s, out_s, lse_s, causal=is_causal, key_padding=mask, scale=self.scale
                )
                dq[:, :, rows] += dq_s
                grads[0][:, :, keys], grads[1][:, :, keys] = dk, dv
            if late is not None:  # of the same keys, from the ranks before
                grads += late.wait()
            late = _Passed.on(grads, self.axis)
        assert late is not None
        dk, dv = late.wait().to(k.dtype)
        return dq.to(q.dtype), dk, dv


def _around(x: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
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


def _of_keys(key_padding: Tensor | None, source: int, length: int, keys: slice) -> Tensor | None:
    """Return the key padding of these keys of a rank, of that of the whole sequence."""
    return None if key_padding is None else key_padding[:, source * length : (source + 1) * length][:, keys]
