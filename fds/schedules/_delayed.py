"""`delayed`: a schedule that begins some updates later."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fds.errors import ScheduleError
from fds.schedules.curve import schedule


@schedule
def delayed(curve: Callable, updates: int = 1, *, before: float | None = None) -> Callable[[Tensor], Tensor]:
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

    >>> from fds.schedules import warmup
    >>> linear = warmup(1.0, warmup_steps=4)
    >>> [linear(t) for t in range(-1, 5)], [delayed(linear)(t) for t in range(-1, 5)]
    ([0.0, 0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.0, 0.25, 0.5, 0.75])
    """
    if not callable(curve):
        raise ScheduleError("delayed takes a schedule", where="delayed", got=repr(curve), want="a function of t")

    def formula(t: Tensor) -> Tensor:
        value = curve((t - updates).clamp(min=-1))
        if not isinstance(value, Tensor):  # filled in, not copied, for which the host would wait
            value = torch.full((), value, dtype=torch.float64, device=t.device)
        value = value.to(t.device, torch.float64)
        return value if before is None else torch.where(t - updates <= -1, before, value)

    return formula
