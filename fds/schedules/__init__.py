"""Schedules for the arguments of optimizers: functions f(t) of the number of updates applied before this one, t >= -1.

`fixed_linear`, `fixed_root`, `fixed_discrete` and `stay_at` are of difficulty: int -> int, of the step t >= 1.

Any function of t can be used instead, such as the closed form of a torch LRScheduler. A step passes t as a () float64
tensor on the device of the state, also on the CPU, and accepts a number or a () tensor: choose between values with
`torch.where`. To index a list or a dict write `int(t)`, which synchronizes with a GPU.

>>> exponential = lambda t: 0.1 * 0.9**t
>>> exponential(1) == 0.1 * 0.9
True
>>> drop = lambda t: torch.where(t < 100, 0.1, 0.01)
"""

from fds.schedules.curve import (
    constant,
    delayed,
    lr_range_test,
    one_cycle,
    one_cycle_momentum,
    warmup,
    warmup_cosine,
    warmup_decay,
)
from fds.schedules.difficulty import by_layer_tokens, by_tokens, fixed_discrete, fixed_linear, fixed_root, stay_at

__all__ = [
    "by_layer_tokens",
    "by_tokens",
    "constant",
    "delayed",
    "fixed_discrete",
    "fixed_linear",
    "fixed_root",
    "lr_range_test",
    "one_cycle",
    "one_cycle_momentum",
    "stay_at",
    "warmup",
    "warmup_cosine",
    "warmup_decay",
]
