"""Attention by the faster implementation: torch's kernels, or `flash_attention` where torch lacks something.

    out = softmax(scale * q k^T + bias) v        with the arguments of `flash_attention`

Torch's kernels run without dropout and, on a GPU, without key padding and bias. On a GPU masks go to `flash_attention`:
torch needs a mask of size Sq x Sk with `causal`, its cuDNN kernel may give NaN gradients of q with any mask (torch 2.11
on an H100 or H200: github.com/pytorch/pytorch/issues/196678), and its other kernels are slow. On the CPU torch's kernel
is fast with masks. Queries that see no key give zeros in torch too, since 2.5.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.kernels import arguments
from fds.kernels.attentions.flash import flash_attention
from fds.kernels.attentions.flash_arguments import check
from fds.kernels.attentions.flash_blocks import LEAST_BIAS


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_padding: Tensor | None = None,
    bias: Tensor | None = None, scale: float | None = None, p: float = 0.0, seed: int | Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Return softmax(scale * q k^T + bias) v, (B, H, Sq, D), by torch's `scaled_dot_product_attention` where possible.

    `flash_attention` runs with dropout (p > 0) and, on a GPU, with `key_padding` or `bias`; torch's kernels otherwise.
    These have a second derivative only within `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.

    Args:
        q: (B, H, Sq, D) float32, float16, bfloat16 or float64.
        k: (B, G, Sk, D) of q's dtype, where G divides H: query head h reads key head h // (H / G).
        v: as k.
        causal: query i sees keys 0 to i, also where Sq and Sk differ.
        key_padding: (B, Sk) bool, False where a key is padding.
        bias: floating, broadcastable to (B, H, Sq, Sk); without a gradient. Values below -1e30 mask.
        scale: of the products; 1 / sqrt(D) if None.
        p: probability with which dropout zeroes an attention weight; the others are divided by 1 - p.
        seed: int or () int64 tensor on q's device; dropout needs one.
        offset: index of the mask among those of one seed.

    Raises `KernelError` as `flash_attention` does.
    """
    if p != 0 or (q.is_cuda and (key_padding is not None or bias is not None)):
        return flash_attention(
            q, k, v, causal=causal, key_padding=key_padding, bias=bias, scale=scale, p=p, seed=seed, offset=offset
        )
    q, k, v = arguments.as_products_cast(q, k, v)
    check(q, k, v, key_padding, bias, scale, p)
    mask = _merged(q, k, causal, key_padding, bias)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _merged(q: Tensor, k: Tensor, causal: bool, key_padding: Tensor | None, bias: Tensor | None) -> Tensor | None:
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
