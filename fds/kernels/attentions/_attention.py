"""Attention by the faster implementation: torch's kernels, or `flash_attention` where torch lacks something.

    out = softmax(scale * q k^T + bias) v        with the arguments of `flash_attention`

Torch's kernels run without dropout, for which they take no seed. With key padding or bias on a GPU `flash_attention`
runs, if its kernel is chosen (`fds.kernels.chosen`) and takes such heads: torch needs a mask of size Sq x Sk with
`causal`, and its kernels that take masks are slow there. On the CPU torch's kernel is fast with masks.

Torch's causal mask is aligned as ours, at the first query and the first key. On a GPU its kernels may sum gradients in
an order that varies from run to run; `torch.use_deterministic_algorithms(True)` has them take a fixed one.
"""

from __future__ import annotations

from torch import Tensor

from fds.kernels import arguments
from fds.kernels.attentions.flash import flash_attention, kernel_runs
from fds.kernels.attentions.flash_arguments import check, positive
from fds.kernels.attentions.scaled_dot_product import scaled_dot_product


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_padding: Tensor | None = None,
    bias: Tensor | None = None, scale: float | None = None, p: float = 0.0, seed: int | Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """Return softmax(scale * q k^T + bias) v, (B, H, Sq, D), by torch's `scaled_dot_product_attention` where possible.

    `flash_attention` runs with dropout (p > 0) and, on a GPU where its kernel is chosen, with `key_padding` or `bias`;
    torch's kernels otherwise. These have a second derivative only within
    `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.

    Args:
        q: (B, H, Sq, D) float32, float16, bfloat16 or float64.
        k: (B, G, Sk, D) of q's dtype, where G divides H: query head h reads key head h // (H / G).
        v: as k.
        causal: query i sees keys 0 to i, also where Sq and Sk differ.
        key_padding: (B, Sk) bool, False where a key is padding.
        bias: floating, broadcastable to (B, H, Sq, Sk); without a gradient. Values below -1e30 mask. On a GPU torch's
            kernels take it rounded to q's dtype.
        scale: of the products; 1 / sqrt(D) if None.
        p: probability with which dropout zeroes an attention weight; the others are divided by 1 - p.
        seed: int or () int64 tensor on q's device; dropout needs one.
        offset: index of the mask among those of one seed.

    Raises `KernelError` as `flash_attention` does.
    """
    has_mask = key_padding is not None or bias is not None
    if p != 0 or (has_mask and q.is_cuda and kernel_runs(q)):
        return flash_attention(
            q, k, v, causal=causal, key_padding=key_padding, bias=bias, scale=scale, p=p, seed=seed, offset=offset
        )
    q, k, v = arguments.as_products_cast(q, k, v)
    check(q, k, v, key_padding, bias, scale, p)
    if scale is not None:
        q, scale = positive(q, scale)
    return scaled_dot_product(q, k, v, causal=causal, key_padding=key_padding, bias=bias, scale=scale)
