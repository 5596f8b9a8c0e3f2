"""`Curve`, a schedule that prints as the call that made it: constants, delays, warm-ups, one cycle, a test of rates.

t counts the updates applied before this one, so update k (1, 2, ...) uses t = k - 1; t = -1 is before training.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, get_origin, overload

import attrs
import torch
from torch import Tensor

from fds.errors import ScheduleError, bound, did_you_mean

P = ParamSpec("P")


@attrs.frozen(repr=False)
class Made:
    """What a factory made: it prints as the call that made it, and equals what the same call makes."""

    factory: Callable[..., Made]
    positional: tuple
    named: tuple[tuple[str, Any], ...]  # those that choose a formula or differ from their defaults, in the given order
    formula: Any = attrs.field(eq=False)

    def __repr__(self) -> str:
        arguments = [repr(value) for value in self.positional] + [f"{name}={value!r}" for name, value in self.named]
        return f"{self.factory.__name__}({', '.join(arguments)})"

    def __reduce__(self) -> tuple:
        return functools.partial(self.factory, *self.positional, **dict(self.named)), ()


M = TypeVar("M", bound=Made)


@attrs.frozen(repr=False)
class Curve(Made):
    """A schedule: a value for each t >= -1. Two curves are equal if they were made by the same call.

    `curve(5)` is a float. `curve(t)` of a tensor is a float64 tensor of its shape on its device, computed there without
    synchronizing. Its formula takes and returns float64, elementwise, on the same device.
    """

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


def schedule(factory: Callable[P, Callable[[Tensor], Tensor]]) -> Callable[P, Curve]:
    """Turn a factory of formulas into a factory of curves that checks its arguments."""
    return made_as(Curve, factory)


def made_as(kind: type[M], factory: Callable[P, Any]) -> Callable[P, M]:
    """Turn a factory of formulas into one of schedules of a kind that checks its arguments.

    An argument annotated `int` must be a count, 0 or more; one annotated `float` a finite number.

    Raises:
        ScheduleError: an argument is missing, unknown or not such a number.
    """
    signature = inspect.signature(factory, eval_str=True)
    chosen = [name for name, parameter in signature.parameters.items() if get_origin(parameter.annotation) is Literal]

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> M:
        call = bound(factory, args, kwargs, ScheduleError)
        for name, value in call.arguments.items():
            _check(factory.__name__, signature.parameters[name], value)
            call.arguments[name] = tuple(value) if type(value) is list else value  # which has a hash
        call.apply_defaults()
        named = tuple((n, v) for n, v in call.kwargs.items() if n in chosen or v != signature.parameters[n].default)
        return kind(make, call.args, named, factory(*call.args, **call.kwargs))

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


Formula = Callable[[Tensor], Tensor]
Kind = Literal["linear", "log"]
RISES = {"linear": lambda t, steps: t / steps, "log": lambda t, steps: (t + 1).log() / math.log(steps)}


@schedule
def constant(value: float) -> Formula:
    """Stay at `value`, in its unit: f(t) = value.

    Raises:
        ScheduleError: `value` is not a finite number.

    >>> f = constant(0.1)
    >>> f, f(-1), f(1000)
    (constant(0.1), 0.1, 0.1)
    """
    return lambda t: torch.full_like(t, value)


@schedule
def delayed(curve: Callable, updates: int = 1, *, before: float | None = None) -> Formula:
    """Return the value that a schedule had `updates` updates ago, and before it begins its value at t = -1.

        f(t) = curve(max(t - updates, -1));  `before`, if given, while t - updates <= -1

    A scheduler that is stepped after each update, as in DeepSpeed's engine, is one update late: its first two updates
    run at t = -1 and t = 0 of its formula.

    Args:
        curve: a schedule, or any function of t, a () float64 tensor.
        updates: number of updates to delay by.
        before: value until then; None for `curve(-1)`.

    Raises:
        ScheduleError: `curve` cannot be called, or `updates` is not a count.

    >>> linear = warmup(1.0, warmup_steps=4)
    >>> [linear(t) for t in range(-1, 5)], [delayed(linear)(t) for t in range(-1, 5)]
    ([0.0, 0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.0, 0.25, 0.5, 0.75])
    """
    if not callable(curve):
        raise ScheduleError("delayed takes a schedule", where="delayed", got=repr(curve), want="a function of t")

    def formula(t: Tensor) -> Tensor:
        value = value_at(curve, (t - updates).clamp(min=-1))
        return value if before is None else torch.where(t - updates <= -1, before, value)

    return formula


def value_at(curve: Callable, t: Tensor) -> Tensor:
    """Return the value of any function of t, on the device of t."""
    value = curve(t)
    if not isinstance(value, Tensor):  # filled in, not copied, for which the host would wait
        value = torch.full((), value, dtype=torch.float64, device=t.device)
    return value.to(t.device, torch.float64)


@schedule
def warmup(peak: float, *, warmup_steps: int = 1000, start: float = 0.0, kind: Kind = "linear") -> Formula:
    """Rise from `start` to `peak` within `warmup_steps` updates, then stay there. Values in the unit of `peak`.

        f(t) = start + (peak - start) * rise(t)
        rise(t) = 0 for t < 0; t / W ("linear") or ln(t + 1) / ln(W) ("log") for 0 <= t < W; 1 for t >= W
        W = warmup_steps; max(2, warmup_steps) for "log"

    Both kinds begin at `start` on the first update, t = 0: "linear" along a straight line, as transformers'
    `get_constant_schedule_with_warmup`; "log" steeply, half of the way after 3 of 10 updates. With `warmup_steps=0`
    there is no warm-up: `peak` from t = 0 on.

    Raises:
        ScheduleError: an argument is not a number of its type, or `kind` is unknown.

    Source: the values of DeepSpeed 0.19.6's WarmupLR, whose default is "log", and whose W is at least 2 in both kinds.
    It uses t = -1 for the first update and t = k - 2 for update k, so that two updates run at `start`; here update k
    uses t = k - 1.

    >>> f = warmup(0.001, warmup_steps=4)
    >>> [round(f(t), 6) for t in (-1, 0, 1, 2, 3, 4, 100)]
    [0.0, 0.0, 0.00025, 0.0005, 0.00075, 0.001, 0.001]
    >>> f
    warmup(0.001, warmup_steps=4, kind='linear')
    """
    fraction = rise(warmup_steps, kind)
    return lambda t: between(start, peak, fraction(t))


def rise(warmup_steps: int, kind: Kind) -> Formula:
    """Return a function of t: the fraction of a warm-up that is done, 0 to 1; `warmup` has the formula."""
    if kind not in RISES:
        hint = did_you_mean(str(kind), RISES)
        raise ScheduleError("unknown kind of warm-up", got=f"kind={kind!r}", want=" or ".join(RISES), hint=hint)
    if warmup_steps == 0:
        return lambda t: (t >= 0).to(t.dtype)
    steps = length(warmup_steps, kind)
    return lambda t: RISES[kind](t.clamp(0, steps), steps).clamp(max=1)


def length(warmup_steps: int, kind: Kind) -> int:
    """Return the number of updates of a warm-up: of a logarithm, by which the formula divides, 0 or at least 2."""
    return max(2, warmup_steps) if warmup_steps and kind == "log" else warmup_steps


def between(low: float, high: float, fraction: Tensor) -> Tensor:
    """Interpolate linearly: exactly `low` where `fraction` is 0, exactly `high` where it is 1."""
    return low * (1 - fraction) + high * fraction


@schedule
def warmup_decay(
    peak: float, *, total_steps: int, warmup_steps: int = 1000, start: float = 0.0, kind: Kind = "linear"
) -> Formula:
    """Rise to `peak` as `warmup` does, then fall linearly to `start` at t = `total_steps`, in the unit of `peak`.

        f(t) = start + (peak - start) * rise(t)                                       for t < W
        f(t) = start + (peak - start) * max(0, total_steps - t) / max(1, total_steps - W)   for t >= W

    with W and rise(t) of `warmup`. If total_steps < W, the curve drops to `start` when the warm-up ends.

    Raises:
        ScheduleError: an argument is missing or not a number of its type, or `kind` is unknown.

    Source: the values of DeepSpeed 0.19.6's WarmupDecayLR at the same t, whose default is kind="log".

    >>> f = warmup_decay(1.0, total_steps=8, warmup_steps=4)
    >>> [f(t) for t in (-1, 0, 2, 4, 6, 8, 9)]
    [0.0, 0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    rising, steps = rise(warmup_steps, kind), length(warmup_steps, kind)

    def value(t: Tensor) -> Tensor:
        falling = (total_steps - t).clamp(min=0) / max(1, total_steps - steps)
        return between(start, peak, torch.where(t < steps, rising(t), falling))

    return value


@schedule
def warmup_cosine(
    peak: float,
    *,
    warmup_steps: int = 1000,
    total_steps: int,
    start_ratio: float = 0.0,
    end_ratio: float = 1e-4,
    kind: Kind = "linear",
) -> Formula:
    """Rise to `peak`, then fall to `end_ratio * peak`. The ratios are fractions of `peak`, the values in its unit.

        f(t) = 0                                                                      for t < 0
        f(t) = peak * (start_ratio + (1 - start_ratio) * rise(t))                     for 0 <= t < W
        f(t) = peak * (end_ratio + (1 - end_ratio) * (1 + cos(pi * p)) / 2)           for t >= W
        p = min(1, (t - W + 1) / max(1, total_steps - W))

    with W and rise(t) of `warmup`; a negative value is 0. The end is reached at t = total_steps - 1, the last of
    `total_steps` updates.

    Raises:
        ScheduleError: an argument is missing or not a number of its type, or `kind` is unknown.

    Source: the values of DeepSpeed 0.19.6's WarmupCosineLR at the same t, whose default is "log"; the cosine is
    Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5, without restarts.

    >>> f = warmup_cosine(0.001, warmup_steps=4, total_steps=8)
    >>> [round(f(t), 9) for t in (-1, 0, 2, 3, 4, 5, 7, 8)]
    [0.0, 0.0, 0.0005, 0.00075, 0.000853568, 0.00050005, 1e-07, 1e-07]
    """
    rising, steps = rise(warmup_steps, kind), length(warmup_steps, kind)

    def value(t: Tensor) -> Tensor:
        up = between(start_ratio, 1.0, rising(t)) * (t >= 0)
        progress = ((t - steps + 1) / max(1, total_steps - steps)).clamp(0, 1)
        down = between(end_ratio, 1.0, (1 + (math.pi * progress).cos()) / 2).clamp(min=0)
        return peak * torch.where(t < steps, up, down)

    return value


@schedule
def one_cycle(
    min_lr: float,
    max_lr: float,
    *,
    first_steps: int = 2000,
    second_steps: int | None = None,
    first_stairs: int = 0,
    second_stairs: int | None = None,
    decay_steps: int = 0,
    decay_rate: float = 0.0,
) -> Formula:
    """Climb from `min_lr` to `max_lr` in `first_steps` updates, descend in `second_steps`, then decay slowly.

        f(t) = (min_lr + (max_lr - min_lr) * h(t)) / (1 + decay_rate * d(t))
        h(t) = b / F for b <= F;  (F + S - b) / S for F < b <= F + S;  0 later        with b = t + 1
        d(t) = max(0, b - F - S) / decay_steps;  0 if decay_steps is 0

    F is `first_steps`, S `second_steps` (None: the same as F; 0: no descent, h is 0 from b = F on). A climb or descent
    in n stairs (0: none; None: as many as the climb) replaces h by floor(h * n) / n, exact on the edge of a stair.
    Values are in the unit of `min_lr`.

    Raises:
        ScheduleError: an argument is missing or not a number of its type, or the climb has no steps.

    Source: the values of DeepSpeed 0.19.6's OneCycle at the same t; Smith 2018, arXiv:1803.09820.

    >>> f = one_cycle(0.25, 1.0, first_steps=3, decay_steps=1, decay_rate=1.0)
    >>> [f(t) for t in range(-1, 8)]
    [0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.125, 0.08333333333333333]
    """
    height = triangle(first_steps, second_steps, first_stairs, second_stairs)
    age = time_after(first_steps, second_steps, decay_steps)
    return lambda t: between(min_lr, max_lr, height(t)) / (1 + decay_rate * age(t))


@schedule
def one_cycle_momentum(
    min_momentum: float = 0.8,
    max_momentum: float = 0.9,
    *,
    first_steps: int = 2000,
    second_steps: int | None = None,
    first_stairs: int = 0,
    second_stairs: int | None = None,
    decay_steps: int = 0,
    decay_rate: float = 0.0,
) -> Formula:
    """Move the momentum opposite to the learning rate of `one_cycle`: `betas=(one_cycle_momentum(...), 0.99)`.

        f(t) = (max_momentum - (max_momentum - min_momentum) * h(t)) * (1 + decay_rate * d(t))

    with h and d of `one_cycle`; pass both the same steps and stairs. A positive `decay_rate` makes the momentum grow
    after the cycle, without bound: choose it so that the momentum stays below 1 until training ends.

    Raises:
        ScheduleError: an argument is not a number of its type, or the climb has no steps.

    Source: the values of DeepSpeed 0.19.6's OneCycle at the same t >= 0. Before its first step DeepSpeed's
    constructor writes `min_momentum`, unlike its own formula; here f(-1) is `max_momentum`, as in the formula.

    >>> f = one_cycle_momentum(0.5, 1.0, first_steps=2)
    >>> [f(t) for t in range(-1, 5)]
    [1.0, 0.75, 0.5, 0.75, 1.0, 1.0]
    """
    height = triangle(first_steps, second_steps, first_stairs, second_stairs)
    age = time_after(first_steps, second_steps, decay_steps)
    return lambda t: between(max_momentum, min_momentum, height(t)) * (1 + decay_rate * age(t))


def triangle(first: int, second: int | None, first_stairs: int, second_stairs: int | None) -> Callable:
    """Return h as a function of t, from 0 to 1; `one_cycle` has the formula."""
    second = first if second is None else second
    second_stairs = first_stairs if second_stairs is None else second_stairs
    if first < 1:
        got = f"first_steps={first}, second_steps={second}"
        raise ScheduleError("the climb of the cycle has no steps", got=got, want="1 or more")

    def height(t: Tensor) -> Tensor:
        up = in_stairs(t + 1, first, first_stairs)
        if not second:
            return torch.where(t + 1 < first, up, 0)
        down = in_stairs(first + second - t - 1, second, second_stairs)
        return torch.minimum(up, down).clamp(min=0)  # each is at least 1 on the other's side of the peak

    return height


def in_stairs(part: Tensor, whole: int, stairs: int) -> Tensor:
    """Return part / whole, rounded down to a multiple of 1 / stairs; multiplies first, since the product is exact."""
    return (part * stairs / whole).floor() / stairs if stairs else part / whole


def time_after(first: int, second: int | None, decay_steps: int) -> Formula:
    """Return d as a function of t: the time since the end of the cycle over `decay_steps`, or 0."""
    end = first + (first if second is None else second) - 1
    return lambda t: (t - end).clamp(min=0) / decay_steps if decay_steps else torch.zeros_like(t)


@schedule
def lr_range_test(start: float = 1e-3, *, steps: int = 2000, rate: float = 1.0, staircase: bool = False) -> Formula:
    """Raise the learning rate by `rate * start` every `steps` updates, linearly or in a staircase.

        f(t) = start * (1 + rate * x)        x = (t + 1) / steps, rounded down if `staircase`

    Values are in the unit of `start`.

    Raises:
        ScheduleError: an argument is not a number of its type, or `steps` is 0.

    Source: the values of DeepSpeed 0.19.6's LRRangeTest at the same t; Smith 2017, arXiv:1506.01186, section 3.3.

    >>> [lr_range_test(0.5, steps=2)(t) for t in range(-1, 4)]
    [0.5, 0.75, 1.0, 1.25, 1.5]
    >>> [lr_range_test(0.5, steps=2, staircase=True)(t) for t in range(-1, 4)]
    [0.5, 0.5, 1.0, 1.0, 1.5]
    """
    if steps < 1:
        raise ScheduleError("the rate must rise every `steps` updates", got=f"steps={steps}", want="1 or more")

    def value(t: Tensor) -> Tensor:
        x = (t + 1) / steps
        return start * (1 + rate * (x.floor() if staircase else x))

    return value
