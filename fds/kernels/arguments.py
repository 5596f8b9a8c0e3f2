"""Checks of the arguments of a kernel, before anything is launched, and casts under autocast."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fds.errors import KernelError, is_number

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def floating(**tensors: Tensor | None) -> None:
    """Raise `KernelError` unless all arguments but None are floating-point tensors on one device."""
    first = None
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.dtype not in FLOATING:
            raise KernelError(
                f"{name} is not a floating-point tensor", where=name, got=_kind(x),
                want="float32, float16, bfloat16 or float64",
            )
        first = first or (name, x)
        if x.device != first[1].device:
            raise KernelError(
                f"{name} is on another device than {first[0]}", where=name, got=str(x.device),
                want=str(first[1].device), hint=f"{name}.to({first[0]}.device)",
            )


def required(**tensors: Tensor | None) -> None:
    """Raise `KernelError` for an argument that is None."""
    for name, x in tensors.items():
        if x is None:
            raise KernelError(f"{name} is missing", where=name, got="None", want="a tensor")


def same_dtype(**tensors: Tensor | None) -> None:
    """Raise `KernelError` unless all arguments but None have the dtype of the first."""
    (first, like), *rest = ((name, x) for name, x in tensors.items() if x is not None)
    for name, x in rest:
        if x.dtype != like.dtype:
            raise KernelError(
                f"{name} has another dtype than {first}", where=name, got=str(x.dtype), want=str(like.dtype),
                hint=f"{name}.to({first}.dtype)",
            )


def shape(want: tuple[int | None, ...], **tensors: Tensor | None) -> None:
    """Raise `KernelError` unless all arguments but None have this shape, in which None stands for any size."""
    for name, x in tensors.items():
        if x is None:
            continue
        if x.dim() != len(want) or any(n is not None and n != m for n, m in zip(want, x.shape, strict=True)):
            words = ", ".join("any" if n is None else str(n) for n in want) + "," * (len(want) == 1)
            raise KernelError(f"{name} has another shape", where=name, got=str(tuple(x.shape)), want=f"({words})")


def alike(**tensors: Tensor | None) -> None:
    """Raise `KernelError` unless all arguments but None have the shape and dtype of the first."""
    same_dtype(**tensors)
    first = next(x for x in tensors.values() if x is not None)
    shape(tuple(first.shape), **{name: x for name, x in tensors.items() if x is not first})


def ratio(name: str, value: float) -> None:
    """Raise `KernelError` unless a dropout probability lies in [0, 1)."""
    if not is_number(value) or not 0 <= value < 1:
        raise KernelError(f"{name} is not a probability", where=name, got=repr(value), want="a number in [0, 1)")


def flags(**values: object) -> None:
    """Raise `KernelError` for what is neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise KernelError(f"{name} is a flag", where=name, got=repr(value)[:80], want="True or False")


def has_rows(**tensors: Tensor | None) -> None:
    """Raise `KernelError` unless all arguments but None have at least one dimension."""
    for name, x in tensors.items():
        if x is not None and x.dim() == 0:
            raise KernelError(f"{name} has no last dimension", where=name, got="()", want="(..., N)")


def under_autocast(dtype: torch.dtype, x: Any) -> Any:
    """Return `x`, a tensor or None, cast to `dtype` where autocast is enabled; otherwise unchanged.

    Autocast casts for torch's own operators only.
    """
    if x is None or x.dtype == dtype or not _is_autocast_on(x):
        return x
    with torch.autocast(x.device.type, enabled=False):  # as autocast does, so that a sharded parameter stays sharded
        return x.to(dtype)


def as_products_cast(first: Tensor, *others: Tensor | None) -> list[Any]:
    """Return tensors and Nones as autocast, where it is enabled, casts them for a matrix product: all but float64."""
    tensors = [first, *others]
    if not isinstance(first, Tensor) or not _is_autocast_on(first):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    is_cast = lambda x: isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return [under_autocast(dtype, x) if is_cast(x) else x for x in tensors]


def width(x: Tensor) -> torch.dtype:
    """Return the dtype in which references compute on such a tensor: float64 for float64, otherwise float32."""
    return torch.promote_types(x.dtype, torch.float32)


def _is_autocast_on(x: Tensor) -> bool:
    kind = x.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _kind(x: object) -> str:
    return str(x.dtype) if isinstance(x, Tensor) else type(x).__name__


def attention(q, k, v, key_padding, bias, scale, p, documents=None) -> None:
    """Raise `KernelError` for arguments that attention does not take."""
    if isinstance(bias, Tensor) and bias.dtype == torch.bool:
        raise KernelError(
            "bias is boolean", where="bias", got="torch.bool",
            want="floating-point numbers, which are added to the scores",
            hint="key_padding takes (B, Sk) bool; for others torch.zeros(mask.shape).masked_fill(~mask, -math.inf)",
        )
    required(q=q, k=k, v=v)
    floating(q=q, k=k, v=v, bias=bias)
    same_dtype(q=q, k=k, v=v)
    if q.dim() != 4:
        raise KernelError("q has another shape", where="q", got=str(tuple(q.shape)), want="(B, H, Sq, D)")
    b, h, m, d = q.shape
    shape((b, None, None, d), k=k)
    shape(tuple(k.shape), v=v)
    ratio("p", p)
    if k.shape[1] != h and (h == 0 or k.shape[1] == 0 or h % k.shape[1]):
        raise KernelError(
            "the heads of k do not divide those of q", where="k", got=f"{k.shape[1]} heads", want=f"a divisor of {h}"
        )
    if key_padding is not None:
        _check_key_padding(key_padding, q, k.shape[2])
    if bias is not None:
        _check_bias(bias, (b, h, m, k.shape[2]))
    if documents is not None:
        _check_documents(documents, q, k.shape[2])
    if scale is not None:
        _check_scale(scale)


def _check_key_padding(key_padding: Tensor, q: Tensor, n: int) -> None:
    if not isinstance(key_padding, Tensor) or key_padding.dtype != torch.bool:
        raise KernelError(
            "key_padding is not boolean", where="key_padding",
            got=str(getattr(key_padding, "dtype", type(key_padding))), want="torch.bool, False where a key is padding",
            hint="key_padding.bool() of a mask of ones and zeros",
        )
    shape((q.shape[0], n), key_padding=key_padding)
    if key_padding.device != q.device:
        raise KernelError(
            "key_padding is on another device than q", where="key_padding", got=str(key_padding.device),
            want=str(q.device), hint="key_padding.to(q.device)",
        )


def check_documents(documents: Any) -> None:
    """Raise `KernelError` for what does not say of tokens in which documents they lie."""
    if not isinstance(documents, Tensor) or documents.dtype not in (torch.int32, torch.int64) or documents.dim() != 2:
        got = f"{tuple(documents.shape)} {documents.dtype}" if isinstance(documents, Tensor) else str(type(documents))
        want = "(B, S) torch.int32 or torch.int64"
        raise KernelError("documents are not numbers of documents", where="documents", got=got, want=want)


def _check_documents(documents: Tensor, q: Tensor, n: int) -> None:
    check_documents(documents)
    if q.shape[2] != n:
        raise KernelError(
            "queries and keys are not of the same tokens, which documents are of", where="documents",
            got=f"{q.shape[2]} queries, {n} keys", want="as many",
        )
    shape((q.shape[0], n), documents=documents)
    if documents.device != q.device:
        raise KernelError(
            "documents are on another device than q", where="documents", got=str(documents.device), want=str(q.device),
            hint="documents.to(q.device)",
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
