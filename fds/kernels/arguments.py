"""Checks of the arguments of a kernel, before anything is launched, and casts under autocast."""

from __future__ import annotations

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
