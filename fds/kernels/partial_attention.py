"""Attention over some of the keys: its result and the log of the sum of its weights, to be merged with those of others.

q (B, H, Sq, D), k and v (B, G, Sk, D), where G divides H and head h reads keys and values h // (H / G)::

    s = scale * q k^T, -inf where masked       lse = log(sum_j exp(s_ij))       out = exp(s - lse) v

Keys in two parts have two such pairs, and those of all keys follow; gradients are sums over parts, each computed with
the `out` and the `lse` of all keys::

    lse = log(exp(lse_1) + exp(lse_2))         out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

Moves: as `flash_attention`; `merge` reads and writes out and lse. On the CPU torch's kernel runs, on a GPU
`flash_attention`'s where it is chosen; else plain torch, with the scores of one part in memory.
Sources: Dao et al. 2022, arXiv:2205.14135, section 3.1; Liu et al. 2023, arXiv:2310.01889, section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fds.kernels import arguments
from fds.kernels.flash import (
    _forward as flash_forward,  # pyright: ignore[reportPrivateUsage]
    kernel_runs,
)
from fds.kernels.flash_backward import backward as flash_backward
from fds.kernels.flash_blocks import empty_numbers

Documents = tuple[Tensor, Tensor] | None

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@torch.no_grad()
def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_padding: Tensor | None, documents: Documents, scale: float
) -> tuple[Tensor, Tensor]:
    """Return out (B, H, Sq, D) of q's dtype, and lse (B, H, Sq) float32, or float64 of such queries.

    A query that sees none of the keys has zeros, and an lse of -inf.

    Args:
        q: (B, H, Sq, D), as `attention` takes it.
        k: (B, G, Sk, D).
        v: as k.
        causal: query i sees keys 0 to i.
        key_padding: (B, Sk) bool, False where a key is padding.
        documents: (B, Sq) and (B, Sk), in which queries and keys lie: a query sees keys of the same alone.
        scale: of the products, greater than zero.
    """
    if q.device.type != "cpu" and kernel_runs(q):
        out, lse = flash_forward(q, k, v, key_padding, None, None, *(documents or (None, None)), causal, scale, 0.0, 0)
        return out, torch.where(lse == math.inf, -math.inf, lse * math.log(2))  # of base 2, inf where there is no key
    return masked_forward(q, k, v, _visible(key_padding, documents), causal=causal, scale=scale)


@torch.no_grad()
def masked_forward(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Do what `forward` does where a mask says which keys a query sees: bool, broadcastable to (B, H, Sq, Sk)."""
    if q.device.type == "cpu":
        rows = _in_rows(q, _heads(k, q), _heads(v, q))
        out, lse = _cpu_forward(*rows, 0.0, causal, attn_mask=_added(q, visible), scale=scale)
        return out, lse if visible is None else lse.masked_fill(_unseeing(q, visible, causal), -math.inf)
    s = _scores(q, k, causal, visible, scale)
    lse = s.logsumexp(-1)
    return (_weights(s, lse) @ _wide(_heads(v, q))).to(q.dtype), lse


@torch.no_grad()
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool,
    key_padding: Tensor | None, documents: Documents, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what these keys add to dq, and dk and dv, of the dtype of q; `out` and `lse` are those of all keys."""
    if q.device.type != "cpu" and kernel_runs(q):
        lse = torch.where(lse == -math.inf, math.inf, lse)  # weights of 0 where a query sees no key at all
        base_2 = empty_numbers(q).copy_(lse / math.log(2))
        masks = key_padding, None, None, *(documents or (None, None))
        return flash_backward(dout, q, k, v, *masks, out, base_2, causal, scale, 0.0, 0)
    return masked_backward(
        dout, q, k, v, out, lse, _visible(key_padding, documents), causal=causal, scale=scale
    )  # fmt: skip


@torch.no_grad()
def masked_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, visible: Tensor | None, *, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Do what `backward` does where a mask says which keys a query sees, as `masked_forward` takes it."""
    lse = torch.where(lse == -math.inf, math.inf, lse)
    if q.device.type == "cpu":
        rows = _in_rows(dout, q, _heads(k, q), _heads(v, q), out)
        dq, dk, dv = _cpu_backward(*rows, lse, 0.0, causal, scale=scale, attn_mask=_added(q, visible))
        return dq, _grouped(dk, k), _grouped(dv, k)
    weights = _weights(_scores(q, k, causal, visible, scale), lse)
    dout, wide = _wide(dout), _wide(q)
    ds = weights * (dout @ _wide(_heads(v, q)).mT - (dout * out).sum(-1, keepdim=True)) * scale
    dk, dv = _grouped(ds.mT @ wide, k), _grouped(weights.mT @ dout, k)
    return (ds @ _wide(_heads(k, q))).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Take up the result of other keys into `out`, (B, H, Sq, D) of the dtype of `lse`, and `lse`, in place."""
    both = torch.logaddexp(lse, other_lse)
    base = both.masked_fill(both == -math.inf, 0.0)  # no key yet
    out.mul_((lse - base).exp_()[..., None]).addcmul_(other.to(out.dtype), (other_lse - base).exp_()[..., None])
    lse.copy_(both)


def _in_rows(*tensors: Tensor) -> list[Tensor]:
    """Return tensors whose features lie side by side, as torch's kernels read them whatever their strides say."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _wide(x: Tensor) -> Tensor:
    return x.to(arguments.width(x))


def _heads(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values repeated for each head of queries, (B, H, Sk, D)."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Return the sum over the heads of queries that share a head of keys, (B, G, Sk, D)."""
    return x if x.shape[1] == k.shape[1] else x.unflatten(1, (k.shape[1], -1)).sum(2)


def _visible(key_padding: Tensor | None, documents: Documents) -> Tensor | None:
    """Return which keys a query sees but for the causal mask, (B, 1, Sq or 1, Sk) bool; None for all."""
    visible = None if key_padding is None else key_padding[:, None, None, :]
    if documents is None:
        return visible
    same = (documents[0][:, :, None] == documents[1][:, None, :])[:, None]
    return same if visible is None else visible & same


def _added(q: Tensor, visible: Tensor | None) -> Tensor | None:
    """Return what is added to scores."""
    return None if visible is None else torch.zeros_like(visible, dtype=q.dtype).masked_fill_(~visible, -math.inf)


def _unseeing(q: Tensor, visible: Tensor, causal: bool) -> Tensor:
    """Return which queries see none of the keys, (B, 1, Sq) or (B, 1, 1) bool."""
    if causal and visible.shape[2] == 1:
        return visible[:, :, 0].cumsum(-1)[..., : q.shape[2]] == 0
    return ~(visible.tril() if causal else visible).any(-1)


def _scores(q: Tensor, k: Tensor, causal: bool, visible: Tensor | None, scale: float) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        s = _wide(q) @ _wide(_heads(k, q)).mT * scale
    if visible is not None:
        s = s.masked_fill(~visible, -math.inf)
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return s


def _weights(s: Tensor, lse: Tensor) -> Tensor:
    """Return exp(s - lse), 0 where a query sees no key."""
    return torch.where(s == -math.inf, 0.0, (s - lse[..., None]).exp())
