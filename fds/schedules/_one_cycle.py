"""`one_cycle`: the learning rate rises and falls once, then decays; `one_cycle_momentum` does the opposite."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fds.errors import ScheduleError
from fds.schedules._warmup import between
from fds.schedules.curve import schedule


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
) -> Callable[[Tensor], Tensor]:
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
) -> Callable[[Tensor], Tensor]:
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


def time_after(first: int, second: int | None, decay_steps: int) -> Callable[[Tensor], Tensor]:
    """Return d as a function of t: the time since the end of the cycle over `decay_steps`, or 0."""
    end = first + (first if second is None else second) - 1
    return lambda t: (t - end).clamp(min=0) / decay_steps if decay_steps else torch.zeros_like(t)
