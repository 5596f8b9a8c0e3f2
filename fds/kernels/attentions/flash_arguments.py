"""Checks of the arguments of attention, before anything is launched."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fds.errors import KernelError, is_number
from fds.kernels import arguments


def check(q, k, v, key_padding, bias, scale, p) -> None:
    """Raise `KernelError` for arguments that attention does not take."""
    if isinstance(bias, Tensor) and bias.dtype == torch.bool:
        raise KernelError(
            "bias is boolean", where="bias", got="torch.bool",
            want="floating-point numbers, which are added to the scores",
            hint="key_padding takes (B, Sk) bool; for others torch.zeros(mask.shape).masked_fill(~mask, -math.inf)",
        )
    arguments.required(q=q, k=k, v=v)
    arguments.floating(q=q, k=k, v=v, bias=bias)
    arguments.same_dtype(q=q, k=k, v=v)
    if q.dim() != 4:
        raise KernelError("q has another shape", where="q", got=str(tuple(q.shape)), want="(B, H, Sq, D)")
    b, h, m, d = q.shape
    arguments.shape((b, None, None, d), k=k)
    arguments.shape(tuple(k.shape), v=v)
    arguments.ratio("p", p)
    if k.shape[1] != h and (h == 0 or k.shape[1] == 0 or h % k.shape[1]):
        raise KernelError(
            "the heads of k do not divide those of q", where="k", got=f"{k.shape[1]} heads", want=f"a divisor of {h}"
        )
    if key_padding is not None:
        _check_key_padding(key_padding, q, k.shape[2])
    if bias is not None:
        _check_bias(bias, (b, h, m, k.shape[2]))
    if scale is not None:
        _check_scale(scale)


def _check_key_padding(key_padding: Tensor, q: Tensor, n: int) -> None:
    if not isinstance(key_padding, Tensor) or key_padding.dtype != torch.bool:
        raise KernelError(
            "key_padding is not boolean", where="key_padding",
            got=str(getattr(key_padding, "dtype", type(key_padding))), want="torch.bool, False where a key is padding",
            hint="key_padding.bool() of a mask of ones and zeros",
        )
    arguments.shape((q.shape[0], n), key_padding=key_padding)
    if key_padding.device != q.device:
        raise KernelError(
            "key_padding is on another device than q", where="key_padding", got=str(key_padding.device),
            want=str(q.device), hint="key_padding.to(q.device)",
        )


def _check_bias(bias: Tensor, scores: tuple[int, ...]) -> None:
    if bias.dim() > 4 or any(x not in (1, y) for x, y in zip(bias.shape[::-1], scores[::-1], strict=False)):
        raise KernelError(
            "bias does not broadcast to the scores", where="bias", got=str(tuple(bias.shape)),
            want=f"broadcastable to (B, H, Sq, Sk) = {scores}",
        )
    if bias.requires_grad:
        raise KernelError(
            "bias requires a gradient, and gets none", where="bias", got="requires_grad=True",
            want="a constant", hint="bias.detach(); for a learned bias torch's scaled_dot_product_attention",
        )


def _check_scale(scale: float) -> None:
    if not is_number(scale) or not -math.inf < scale < math.inf:
        raise KernelError("scale is not a number", where="scale", got=repr(scale), want="a finite float, or None")


def positive(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return q and a scale greater than zero with the same products: kernels find the largest before they scale."""
    return (q, scale) if scale > 0 else (q * (-1.0 if scale else 0.0), -scale or 1.0)
