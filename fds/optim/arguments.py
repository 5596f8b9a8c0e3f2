"""The arguments of a factory: refuse bad ones, spell good ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import torch
from torch import Tensor

from fds.errors import OptimizerError, is_number


def demand(factory: str, *, low: float = 0.0, high: float = inf, schedule: bool = True, **values: Any) -> None:
    """Raise `OptimizerError` for a value outside [low, high), or a schedule where there may be none.

    Where there may be a schedule there may be a 0-d tensor, too, which is read once.

    >>> demand("adam", eps=1e-8, schedule=False)
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
            f"{factory}: {name} is out of range", where=name, got=repr(value),
            want=bounds + (", or a schedule f(t)" if schedule else ""),
            hint="" if schedule or not callable(value) else f"{name} cannot follow a schedule",
        )  # fmt: skip


def demand_betas(factory: str, betas: Any) -> None:
    """Raise `OptimizerError` unless `betas` is a pair of values in [0, 1) or schedules."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise OptimizerError(
            f"{factory}: betas is not a pair", where="betas", got=repr(betas), want="(beta1, beta2)",
            hint="one beta that changes with t goes inside the pair: (beta1, lambda t: ...)",
        )  # fmt: skip
    demand(factory, high=1.0, **{"betas[0]": betas[0], "betas[1]": betas[1]})


def spell(factory: Callable, arguments: Mapping[str, Any]) -> str:
    """Return the call of `factory` that gives these arguments, defaults left out.

    >>> spell(demand_betas, {"factory": "lion", "betas": (0.9, 0.99)})
    "demand_betas(factory='lion', betas=(0.9, 0.99))"
    """
    parameters = inspect.signature(factory).parameters.values()
    given = (p.name for p in parameters if arguments[p.name] != p.default)
    return f"{factory.__name__}({', '.join(f'{name}={_word(arguments[name])}' for name in given)})"


def _word(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_word, value)) + ")"
    if isinstance(value, Tensor):
        return repr(float(value))
    return value.__qualname__ if inspect.isfunction(value) else repr(value)
