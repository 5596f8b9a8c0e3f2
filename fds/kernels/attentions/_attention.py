"""Attention by whoever is best at it: torch's own kernels, or `flash_attention` where torch lacks something.

    out = softmax(scale * q k^T + bias) v        with the arguments of `flash_attention`

Torch runs where there is no dropout, and no key padding or bias either if the device is a GPU. There a mask is left to
`flash_attention`: torch wants it of size Sq x Sk with `causal`, its cuDNN kernel may give NaN gradients of q with any
(torch 2.11 on an H100 or H200: github.com/pytorch/pytorch/issues/196678), and the others are slow. On the CPU torch's
kernel takes masks well. Queries that see no key give zeros in torch too, since 2.5.
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
) -> Tensor:  # fmt: skip
    """Return softmax(scale * q k^T + bias) v, (B, H, Sq, D), by torch's `scaled_dot_product_attention` where it can.

    It is `flash_attention` with dropout (p > 0), and with `key_padding` or `bias` on a GPU; torch's otherwise. Torch's
    own choice of kernels has no second derivative: within `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)` it has.

    Args:
        q: (B, H, Sq, D) float32, float16, bfloat16 or float64.
        k: (B, G, Sk, D) of q's dtype, where G divides H: query head h reads key head h // (H / G).
        v: as k.
        causal: query i sees keys 0 to i, also where Sq and Sk differ.
        key_padding: (B, Sk) bool, True where a key is real.
        bias: floating, broadcastable to (B, H, Sq, Sk); a constant. Below -1e30 it masks.
        scale: of the products; 1 / sqrt(D) if None.
        p: ratio of the probabilities that dropout zeroes; the others are divided by 1 - p.
        seed: int or () int64 tensor on q's device; dropout needs one.
        offset: which of the seed's masks.

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
    """Return one mask of all, no wider than they are together; None where torch needs none."""
    if key_padding is None and bias is None:
        return None
    seen = None if key_padding is None else key_padding[:, None, None, :]
    if causal:
        ahead = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        seen = ahead if seen is None else seen & ahead
    if bias is None:
        return seen
    bias = bias.to(arguments.width(q))[(None,) * (4 - bias.dim())]  # 3 dimensions are slow
    above = bias >= LEAST_BIAS
    return torch.where(above if seen is None else above & seen, bias, -math.inf)
