"""Check the arguments of an optimizer, and show them in its repr."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import torch
from torch import Tensor

from fds.errors import OptimizerError, is_number


def check_numbers(factory: str, *, low: float = 0.0, high: float = inf, schedule: bool = True, **values: Any) -> None:
    """Raise `OptimizerError` for a value outside [low, high), and for a schedule unless `schedule`.

    Where a schedule is allowed a 0-d tensor is too; it is read once.

    >>> check_numbers("adam", eps=1e-8, schedule=False)
    """
    bounds = f"a number of at least {low:g}" if high == inf else f"a number in [{low:g}, {high:g})"
    for name, value in values.items():
        if callable(value) and schedule:
            continue
        if isinstance(value, Tensor) and value.dim() == 0 and value.dtype != torch.bool and schedule:
            value = float(value)
        if is_number(value) and low <= value < high:
            continue
        raise OptimizerError(
            f"{factory}: {name} is out of range",
            where=name,
            got=repr(value),
            want=bounds + (", or a schedule f(t)" if schedule else ""),
            hint="" if schedule or not callable(value) else f"{name} cannot follow a schedule",
        )


def check_betas(factory: str, betas: Any) -> None:
    """Raise `OptimizerError` unless `betas` is a pair of values in [0, 1) or schedules."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise OptimizerError(
            f"{factory}: betas is not a pair",
            where="betas",
            got=repr(betas),
            want="(beta1, beta2)",
            hint="to schedule a beta, write (beta1, lambda t: ...)",
        )
    check_numbers(factory, high=1.0, **{"betas[0]": betas[0], "betas[1]": betas[1]})


def call_text(factory: Callable, arguments: Mapping[str, Any]) -> str:
    """Return the call of `factory` with these arguments as text: the rate, and what is not at its default.

    >>> call_text(check_betas, {"factory": "lion", "betas": (0.9, 0.99)})
    "check_betas(factory='lion', betas=(0.9, 0.99))"
    """
    parameters = inspect.signature(factory).parameters.values()
    names = (p.name for p in parameters if p.name == "lr" or arguments[p.name] != p.default)
    return f"{factory.__name__}({', '.join(f'{name}={_shown(arguments[name])}' for name in names)})"


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_shown, value)) + ")"
    if isinstance(value, Tensor):
        return repr(float(value))
    return value.__qualname__ if inspect.isfunction(value) else repr(value)
