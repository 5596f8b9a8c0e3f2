"""`warmup`: rise from a start value to a peak and stay there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from fds.errors import ScheduleError, did_you_mean
from fds.schedules.curve import schedule

Kind = Literal["linear", "log"]
RISES = {"linear": lambda t, steps: t / steps, "log": lambda t, steps: (t + 1).log() / math.log(steps)}


@schedule
def warmup(
    peak: float, *, warmup_steps: int = 1000, start: float = 0.0, kind: Kind = "linear"
) -> Callable[[Tensor], Tensor]:
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


def rise(warmup_steps: int, kind: Kind) -> Callable[[Tensor], Tensor]:
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
