"""Checks of what layers and plans are told, before parameters are made or anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fds.collectives import Axis
from fds.errors import FdsError, LossError, did_you_mean, is_a, is_int, is_number


def sizes(where: str, **values: Any) -> None:
    """Raise `LossError` for what is not a number of features, heads or rows."""
    for name, value in values.items():
        if not is_int(value, 1):
            raise LossError(f"{where}: {name} is a size", where=name, got=repr(value)[:80], want="an int >= 1")


def flags(where: str, error: type[FdsError], **values: Any) -> None:
    """Raise an error for what is neither True nor False."""
    for name, value in values.items():
        if not is_a(value, bool):
            raise error(f"{where}: {name} is a flag", where=name, got=repr(value)[:80], want="True or False")


def rate(where: str, dropout: Any) -> None:
    """Raise `LossError` for what is not a probability."""
    if not is_number(dropout) or not 0 <= dropout <= 1:
        raise LossError(
            f"{where}: dropout is a probability", where="dropout", got=repr(dropout)[:80], want="a number in [0, 1]"
        )


def factory(where: str, options: Mapping[str, Any]) -> None:
    """Raise `LossError` for what is not a device and a floating-point dtype."""
    for name in options:
        if name not in ("device", "dtype"):
            hint = did_you_mean(name, ["device", "dtype"])
            raise LossError(f"{where} takes no {name}", where=name, want="device= or dtype=", hint=hint)
    dtype, device = options.get("dtype"), options.get("device")
    if dtype is not None and not (is_a(dtype, torch.dtype) and dtype.is_floating_point):
        raise LossError(
            f"{where}: dtype is not of floating-point numbers",
            where="dtype",
            got=repr(dtype)[:80],
            want="such as torch.float32",
        )
    try:
        if device is not None:
            torch.device(device)
    except (RuntimeError, TypeError):
        raise LossError(
            f"{where}: there is no such device", where="device", got=repr(device)[:80], want='such as "cuda"'
        ) from None


def axis(where: str, value: Any, error: type[FdsError]) -> None:
    """Raise an error for what is not an axis."""
    if not is_a(value, Axis):
        raise error(f"{where}: axis is not an axis", where="axis", got=repr(value)[:80], want='fds.mesh(tp=-1)["tp"]')
