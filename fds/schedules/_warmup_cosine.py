"""`warmup_cosine`: rise to a peak, then fall along half a cosine."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fds.schedules._warmup import Kind, between, length, rise
from fds.schedules.curve import schedule


@schedule
def warmup_cosine(
    peak: float,
    *,
    warmup_steps: int = 1000,
    total_steps: int,
    start_ratio: float = 0.0,
    end_ratio: float = 1e-4,
    kind: Kind = "linear",
) -> Callable[[Tensor], Tensor]:
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
