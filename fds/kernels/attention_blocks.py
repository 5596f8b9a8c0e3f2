"""Attention of long rows with masks: block after block, none of which makes a mask of all queries by all keys.

    out = softmax(scale * q k^T) v over the keys that a query sees: those before it, of a window, of its document

q (B, H, Sq, D), k and v (B, G, Sk, D). Blocks of queries and keys are merged as `fds.kernels.partial_attention` merges
the keys of several ranks. A block of which no query sees a key is not computed; where all see all there is no mask.

Holds: beside the result one mask (B, 1, QUERIES, KEYS), forward and backward; on a GPU a block's scores too, (B, H,
QUERIES, KEYS) float32. On one whose kernel takes documents that one runs, where there is no window.
Sources: Dao et al. 2022, arXiv:2205.14135, section 3.1; Beltagy et al. 2020, arXiv:2004.05150 (windows).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from fds.kernels import arguments, partial_attention as partial
from fds.kernels.flash import kernel_runs
from fds.kernels.operators import Function, as_rows, first_order

QUERIES, KEYS = 1024, 2048  # of a block: the mask has 8 MB of float32 for a row
WHOLE = 2**24  # scores of a head up to which one mask is made of all: at most 4096 by 4096


@attrs.frozen(eq=False)
class Mask:
    """Which keys a query sees."""

    causal: bool = False
    key_padding: Tensor | None = None  # (B, Sk) bool
    documents: partial.Documents = None  # (B, Sq) and (B, Sk)
    window: int | None = None  # a query sees keys whose positions are less than so many before its own
    distance: int = 0  # of a window: the position of the first query, less that of the first key

    def sees_all(self, rows: slice, keys: slice) -> bool:
        """Return whether positions hide nothing in a block."""
        first, last = rows.start + self.distance - (keys.stop - 1), rows.stop - 1 + self.distance - keys.start
        return (not self.causal or first >= 0) and (self.window is None or last < self.window)

    def sees_none(self, rows: slice, keys: slice) -> bool:
        """Return whether positions hide everything in a block."""
        first, last = rows.start + self.distance - (keys.stop - 1), rows.stop - 1 + self.distance - keys.start
        return (self.causal and last < 0) or (self.window is not None and first >= self.window)

    def block(self, rows: slice, keys: slice, device: torch.device) -> Tensor | None:
        """Return which of these keys these queries see, (B or 1, 1, Sq or 1, Sk) bool; None for all."""
        parts: list[Tensor] = []
        if not self.sees_all(rows, keys):
            at = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.distance
            before = at - torch.arange(keys.start, keys.stop, device=device)
            seen = before >= 0 if self.causal else torch.ones_like(before, dtype=torch.bool)
            parts.append((seen if self.window is None else seen & (before < self.window))[None, None])
        if self.key_padding is not None:
            parts.append(self.key_padding[:, None, None, keys])
        if self.documents is not None:
            of_rows, of_keys = self.documents[0][:, rows], self.documents[1][:, keys]
            parts.append((of_rows[:, :, None] == of_keys[:, None, :])[:, None])
        if _has_values(device):
            parts = [x for x in parts if not bool(x.all())]
        return functools.reduce(torch.logical_and, parts) if parts else None

    def blocks(self, queries: int, keys: int, device: torch.device) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yield queries and keys of each block of which something is seen, and the mask."""
        for i in range(0, queries, QUERIES):
            rows = slice(i, min(i + QUERIES, queries))
            for j in range(0, keys, KEYS):
                part = slice(j, min(j + KEYS, keys))
                if self.sees_none(rows, part):
                    continue
                visible = self.block(rows, part, device)
                if visible is None or not _has_values(device) or bool(visible.any()):
                    yield rows, part, visible


def _has_values(device: torch.device) -> bool:
    """Return whether masks may be looked at: a GPU would have to be waited for, and compiled code cannot."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Return attention (B, H, Sq, D) for checked arguments, scale > 0."""
    key_padding, documents = mask.key_padding, (None, None) if mask.documents is None else mask.documents
    return _Blocks.apply(q, k, v, key_padding, *documents, mask.causal, mask.window, scale)[0]


@torch.no_grad()
def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    """Return out and lse, as `partial_attention.forward` does, of which out may be float32."""
    if _is_whole(q, k, mask):
        masks = {"key_padding": mask.key_padding, "documents": mask.documents}
        return partial.forward(q, k, v, causal=mask.causal, scale=scale, **masks)
    b, h, s, d = q.shape
    out = q.new_zeros((b, s, h, d), dtype=arguments.width(q)).transpose(1, 2)
    lse = torch.full((b, h, s), -math.inf, dtype=out.dtype, device=q.device)
    for rows, keys, visible in mask.blocks(s, k.shape[2], q.device):
        part = partial.masked_forward(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], visible, causal=False, scale=scale
        )  # fmt: skip
        partial.merge(out[:, :, rows], lse[:, :, rows], *part)
    return out, lse


@torch.no_grad()
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what these keys add to dq, and dk and dv, which may be float32; `out` and `lse` are those of all keys."""
    if _is_whole(q, k, mask):
        masks = {"key_padding": mask.key_padding, "documents": mask.documents}
        return partial.backward(dout, q, k, v, out, lse, causal=mask.causal, scale=scale, **masks)
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    for rows, keys, visible in mask.blocks(q.shape[2], k.shape[2], q.device):
        dout_s, q_s, out_s, lse_s = (x[:, :, rows] for x in (dout, q, out, lse))
        k_s, v_s = k[:, :, keys], v[:, :, keys]
        parts = partial.masked_backward(dout_s, q_s, k_s, v_s, out_s, lse_s, visible, causal=False, scale=scale)
        dq[:, :, rows] += parts[0]
        dk[:, :, keys] += parts[1]
        dv[:, :, keys] += parts[2]
    return dq, dk, dv


def _is_whole(q: Tensor, k: Tensor, mask: Mask) -> bool:
    """Return whether a kernel, or one mask of all queries by all keys, is what computes this."""
    if mask.window is not None:
        return False
    # a mask of keys alone is one row
    return mask.documents is None or q.shape[2] * k.shape[2] <= WHOLE or (q.device.type != "cpu" and kernel_runs(q))


class _Blocks(Function):
    @staticmethod
    def forward(
        q: Any, k: Any, v: Any, key_padding: Any, of_queries: Any, of_keys: Any, causal: Any, window: Any, scale: Any
    ) -> tuple[Tensor, Tensor]:
        documents = None if of_queries is None else (of_queries, of_keys)
        out, lse = forward(q, k, v, Mask(causal, key_padding, documents, window), scale)
        return out.to(q.dtype), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.save_for_backward(*inputs[:6], *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # or zeros would be made for lse
        ctx.options = inputs[6:]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if dout is None:
            return (None,) * 9
        return *first_order(_Gradients(*ctx.options), dout, *ctx.saved_tensors), *[None] * 6

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        results = _Blocks.apply(*as_rows(info.batch_size, in_dims, args))
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in results), (0, 0)


@attrs.frozen
class _Gradients:
    """The backward pass, in the form in which `first_order` takes one."""

    causal: bool
    window: int | None
    scale: float
    name: str = "attention_in_blocks_backward"
    has_rows: ClassVar = True

    def __call__(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, key_padding: Tensor | None, of_queries: Tensor | None,
        of_keys: Tensor | None, out: Tensor, lse: Tensor,
    ) -> list[Tensor]:
        """Return dq, dk and dv."""
        documents = None if of_queries is None or of_keys is None else (of_queries, of_keys)
        mask = Mask(self.causal, key_padding, documents, self.window)
        return [x.to(q.dtype) for x in backward(dout, q, k, v, out, lse, mask, self.scale)]
