"""`Curve`: a schedule, a pure function of t that prints as the call that made it.

t counts the updates applied before this one, so update k (1, 2, ...) uses t = k - 1; t = -1 is before training.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, get_origin, overload

import attrs
import torch
from torch import Tensor

from fds.errors import ScheduleError, bound

P = ParamSpec("P")


@attrs.frozen(repr=False)
class Curve:
    """A schedule: a value for each t >= -1. Two curves are equal if they were made by the same call.

    `curve(5)` is a float. `curve(t)` of a tensor is a float64 tensor of its shape on its device, computed there without
    synchronizing.
    """

    factory: Callable[..., Curve]
    positional: tuple
    named: tuple[tuple[str, Any], ...]  # those that choose a formula or differ from their defaults, in the given order
    formula: Callable[[Tensor], Tensor] = attrs.field(eq=False)  # float64 to float64, elementwise, same device

    @property
    def draws(self) -> bool:
        """Whether it may draw random numbers: a user's function among the arguments may."""
        inner = filter(callable, (*self.positional, *(value for _, value in self.named)))
        return any(getattr(function, "draws", True) for function in inner)

    @overload
    def __call__(self, t: int) -> float: ...
    @overload
    def __call__(self, t: Tensor) -> Tensor: ...
    def __call__(self, t):
        if isinstance(t, Tensor):
            return self.formula(t.to(torch.float64))
        return self.formula(torch.tensor(t, dtype=torch.float64, device="cpu")).item()  # the same formula for both

    def __repr__(self) -> str:
        arguments = [repr(value) for value in self.positional] + [f"{name}={value!r}" for name, value in self.named]
        return f"{self.factory.__name__}({', '.join(arguments)})"

    def __reduce__(self) -> tuple:
        return functools.partial(self.factory, *self.positional, **dict(self.named)), ()


def schedule(factory: Callable[P, Callable[[Tensor], Tensor]]) -> Callable[P, Curve]:
    """Turn a factory of formulas into a factory of curves that checks its arguments.

    An argument annotated `int` must be a count, 0 or more; one annotated `float` a finite number.

    Raises:
        ScheduleError: an argument is missing, unknown or not such a number.
    """
    signature = inspect.signature(factory, eval_str=True)
    chosen = [name for name, parameter in signature.parameters.items() if get_origin(parameter.annotation) is Literal]

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> Curve:
        call = bound(factory, args, kwargs, ScheduleError)
        for name, value in call.arguments.items():
            _check(factory.__name__, signature.parameters[name], value)
        call.apply_defaults()
        named = tuple((n, v) for n, v in call.kwargs.items() if n in chosen or v != signature.parameters[n].default)
        return Curve(make, call.args, named, factory(*args, **kwargs))

    return make


def _check(function: str, parameter: inspect.Parameter, value: Any) -> None:
    if parameter.annotation in (int, int | None):
        good, want = isinstance(value, int) and value >= 0, "a count, 0 or more"
    elif parameter.annotation is float:
        good, want = isinstance(value, int | float) and math.isfinite(value), "a finite number"
    else:
        return
    if not good and not (value is None and parameter.default is None):
        what = f"{function} cannot use this {parameter.name}"
        raise ScheduleError(what, where=function, got=f"{parameter.name}={value!r}", want=want)
