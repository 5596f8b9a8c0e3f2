"""`lr_range_test`: raise the learning rate until training diverges, to find the largest usable one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fds.errors import ScheduleError
from fds.schedules.curve import schedule


@schedule
def lr_range_test(
    start: float = 1e-3, *, steps: int = 2000, rate: float = 1.0, staircase: bool = False
) -> Callable[[Tensor], Tensor]:
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
