"""`constant`: the same value at every t."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fds.schedules.curve import schedule


@schedule
def constant(value: float) -> Callable[[Tensor], Tensor]:
    """Stay at `value`, in its unit: f(t) = value.

    Raises:
        ScheduleError: `value` is not a finite number.

    >>> f = constant(0.1)
    >>> f, f(-1), f(1000)
    (constant(0.1), 0.1, 0.1)
    """
    return lambda t: torch.full_like(t, value)
