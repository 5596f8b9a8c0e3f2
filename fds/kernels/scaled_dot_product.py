"""Attention by the faster implementation: torch's kernels, or `flash_attention` where torch lacks something.

    out = softmax(scale * q k^T + bias) v        with the arguments of `flash_attention`

Torch's kernels run without dropout, for which they take no seed. With key padding or bias on a GPU `flash_attention`
runs, if its kernel is chosen (`fds.kernels.chosen`) and takes such heads: torch needs a mask of size Sq x Sk with
`causal`, and its kernels that take masks are slow there. On the CPU torch's kernel is fast with masks.

Torch's causal mask is aligned as ours, at the first query and the first key. On a GPU its kernels may sum gradients in
an order that varies from run to run; `torch.use_deterministic_algorithms(True)` has them take a fixed one.

On a GPU torch's memory-efficient kernel takes masks, or its plain formula where that one cannot; cuDNN's never: it may
give NaN gradients of q with any mask (torch 2.11 to 2.13 on an H100 or H200: github.com/pytorch/pytorch/issues/196678).
Queries that see no key give zeros, since torch 2.5.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fds.errors import KernelError, is_int
from fds.kernels import arguments
from fds.kernels.arguments import attention as check, positive
from fds.kernels.attention_blocks import WHOLE, Mask, attention as attention_in_blocks
from fds.kernels.flash import flash_attention, kernel_runs
from fds.kernels.flash_blocks import LEAST_BIAS

MAX_INT = 2**63 - 1  # with which positions are compared


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_padding: Tensor | None = None,
    bias: Tensor | None = None, documents: Tensor | None = None, window: int | None = None,
    scale: float | None = None, p: float = 0.0, seed: int | Tensor | None = None, offset: int = 0,
) -> Tensor:
    """Return softmax(scale * q k^T + bias) v, (B, H, Sq, D), by torch's `scaled_dot_product_attention` where possible.

    `flash_attention` runs with dropout (p > 0) and, on a GPU where its kernel is chosen, with a mask or a bias; torch's
    kernels otherwise. These have a second derivative only within
    `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.

    Args:
        q: (B, H, Sq, D) float32, float16, bfloat16 or float64.
        k: (B, G, Sk, D) of q's dtype, where G divides H: query head h reads key head h // (H / G).
        v: as k.
        causal: query i sees keys 0 to i, also where Sq and Sk differ.
        key_padding: (B, Sk) bool, False where a key is padding.
        bias: floating, broadcastable to (B, H, Sq, Sk); without a gradient. Values below -1e30 mask. On a GPU torch's
            kernels take it rounded to q's dtype.
        documents: (B, S) int32 or int64, where Sq = Sk = S: a query sees the keys of the same number alone.
        window: with `causal`, query i sees keys i - window + 1 to i; without a bias or dropout.
        scale: of the products; 1 / sqrt(D) if None.
        p: probability with which dropout zeroes an attention weight; the others are divided by 1 - p.
        seed: int or () int64 tensor on q's device; dropout needs one.
        offset: index of the mask among those of one seed.

    Raises `KernelError` as `flash_attention` does.
    """
    arguments.flags(causal=causal)
    if window is not None:
        check_window(window, causal, bias, p)
    has_mask = key_padding is not None or bias is not None or documents is not None
    if p != 0 or (has_mask and window is None and q.is_cuda and kernel_runs(q)):
        return flash_attention(
            q, k, v, causal=causal, key_padding=key_padding, bias=bias, documents=documents, scale=scale, p=p,
            seed=seed, offset=offset,
        )
    q, k, v = arguments.as_products_cast(q, k, v)
    check(q, k, v, key_padding, bias, scale, p, documents)
    if scale is not None:
        q, scale = positive(q, scale)
    # one mask of all queries by all keys would take as many bytes as their scores
    if window is not None or (documents is not None and bias is None and q.shape[2] * k.shape[2] > WHOLE):
        both = None if documents is None else (documents, documents)
        factor = max(q.shape[3], 1) ** -0.5 if scale is None else scale
        return attention_in_blocks(q, k, v, Mask(causal, key_padding, both, window), factor)
    return scaled_dot_product(
        q, k, v, causal=causal, key_padding=key_padding, bias=bias, documents=documents, scale=scale
    )


def check_window(window: Any, causal: bool, bias: Tensor | None, p: float) -> None:
    """Raise `KernelError` for what is no window, and what is not computed with one."""
    if not is_int(window, 1) or window > MAX_INT:
        want = "an int from 1 to 2**63 - 1, or None"
        raise KernelError("window counts keys", where="window", got=repr(window)[:80], want=want)
    if bias is not None or p or not causal:
        got = "a bias" if bias is not None else f"p={p}" if p else "causal=False"
        raise KernelError(
            "attention in a window is causal, and takes neither a bias nor dropout", where="window", got=got
        )


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_padding: Tensor | None, bias: Tensor | None,
    documents: Tensor | None = None, scale: float | None = None, p: float = 0.0,
) -> Tensor:
    """Return what `fds.kernels.attention` does for checked arguments; torch's generator draws the mask of dropout."""
    mask = merged(q, k, causal, key_padding, bias, documents)
    is_causal, shares_heads = causal and mask is None, q.shape[1] != k.shape[1]
    backends = contextlib.nullcontext()
    if mask is not None and q.is_cuda:
        backends = sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
    if shares_heads and q.is_cuda and not _takes_shared_heads(q, mask):
        k, v = (x.repeat_interleave(q.shape[1] // max(x.shape[1], 1), dim=1) for x in (k, v))
        shares_heads = False
    with backends:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=p, is_causal=is_causal, scale=scale, enable_gqa=shares_heads
        )


def _takes_shared_heads(q: Tensor, mask: Tensor | None) -> bool:
    """Return whether cuDNN's kernel or FlashAttention's may run on a GPU.

    The memory-efficient kernel does not take fewer heads of keys, and torch's formula would hold all scores in memory.
    """
    return mask is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[3] <= 256


def merged(
    q: Tensor, k: Tensor, causal: bool, key_padding: Tensor | None, bias: Tensor | None, documents: Tensor | None
) -> Tensor | None:
    """Return all masks as one, of the smallest shape that they broadcast to; None where torch needs no mask."""
    if key_padding is None and bias is None and documents is None:
        return None
    visible = None if key_padding is None else key_padding[:, None, None, :]
    if documents is not None:
        same = (documents[:, :, None] == documents[:, None, :])[:, None]
        visible = same if visible is None else visible & same
    if causal:
        lower = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        visible = lower if visible is None else visible & lower
    if bias is None:
        return visible
    bias = bias.to(arguments.width(q))[(None,) * (4 - bias.dim())]  # torch is slow with 3 dimensions
    above = bias >= LEAST_BIAS
    return torch.where(above if visible is None else above & visible, bias, -math.inf)
