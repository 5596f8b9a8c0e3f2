"""Torch's `scaled_dot_product_attention`, with the masks of `fds.kernels.attention`.

On a GPU its memory-efficient kernel takes masks, or its plain formula where that one cannot; cuDNN's never: it may give
NaN gradients of q with any mask (torch 2.11 to 2.13 on an H100 or H200: github.com/pytorch/pytorch/issues/196678).
Queries that see no key give zeros, since torch 2.5.
"""

from __future__ import annotations

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fds.kernels import arguments
from fds.kernels.attentions.flash_blocks import LEAST_BIAS


def scaled_dot_product(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_padding: Tensor | None, bias: Tensor | None,
    scale: float | None = None, p: float = 0.0,
) -> Tensor:
    """Return what `fds.kernels.attention` does for checked arguments; torch's generator draws the mask of dropout."""
    mask = merged(q, k, causal, key_padding, bias)
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


def merged(q: Tensor, k: Tensor, causal: bool, key_padding: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """Return all masks as one, of the smallest shape that they broadcast to; None where torch needs no mask."""
    if key_padding is None and bias is None:
        return None
    visible = None if key_padding is None else key_padding[:, None, None, :]
    if causal:
        lower = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        visible = lower if visible is None else visible & lower
    if bias is None:
        return visible
    bias = bias.to(arguments.width(q))[(None,) * (4 - bias.dim())]  # torch is slow with 3 dimensions
    above = bias >= LEAST_BIAS
    return torch.where(above if visible is None else above & visible, bias, -math.inf)
