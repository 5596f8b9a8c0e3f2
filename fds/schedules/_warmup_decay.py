"""`warmup_decay`: rise to a peak, then fall linearly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fds.schedules._warmup import Kind, between, length, rise
from fds.schedules.curve import schedule


@schedule
def warmup_decay(
    peak: float, *, total_steps: int, warmup_steps: int = 1000, start: float = 0.0, kind: Kind = "linear"
) -> Callable[[Tensor], Tensor]:
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
