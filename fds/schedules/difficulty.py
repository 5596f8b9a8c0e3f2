"""Schedules of difficulty, for `fds.curriculum` and samplers: an int for each step t >= 1. Learning rates by tokens.

Difficulties decide about shapes, so they are computed on the host, from a number that the host knows. A curriculum asks
for that of t = `calls` + 1, as DeepSpeed's engine does: the first call of a step has t = 1.

Any function `int -> int` can be used instead.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn, ParamSpec

import attrs
import torch
from torch import Tensor

from fds.errors import ScheduleError, is_int
from fds.schedules.curve import Formula, Made, made_as, schedule, value_at

P = ParamSpec("P")
_LAST = 2**53  # steps that are counted: the integers of a float64


@attrs.frozen
class Levels:
    """The difficulty of each step, and the steps from which it may be another; None where nobody knows them."""

    of: Callable[[int], int]
    changes: Callable[[], Iterable[int]] | None


@attrs.frozen(repr=False)
class Difficulty(Made):
    """A schedule of difficulty: an int for each step t, an int. Two are equal if they were made by the same call."""

    draws: ClassVar[bool] = False

    def __call__(self, t: int) -> int:
        """Return the difficulty of step t = 1, 2, ..., the one at which it begins for t = 0. Raises `ScheduleError`."""
        try:
            step = operator.index(t)
        except TypeError:
            step = -1
        if step < 0:
            raise ScheduleError("a step is counted", where=repr(self), got=repr(t)[:60], want="an int, 0 or more")
        return self.formula.of(step)


def _difficulty(factory: Callable[P, Levels]) -> Callable[P, Difficulty]:
    return made_as(Difficulty, factory)


def _refuse(function: str, what: str, got: str, want: str) -> NoReturn:
    raise ScheduleError(f"{function}: {what}", where=function, got=got, want=want)


@_difficulty
def fixed_linear(least: int, greatest: int, total: int, *, difficulty_step: int = 1) -> Levels:
    """Grow from `least` to `greatest` in `total` steps, along a line, in multiples of `difficulty_step`.

        f(t) = min(greatest, max(ceil(least / d) d, floor((t / total) (greatest - least) + least) rounded down to d's))

    d is `difficulty_step`. A `greatest` that is no multiple of d is reached after `total`, where the line reaches the
    next one.

    Raises:
        ScheduleError: an argument is no count, `total` or `difficulty_step` is 0, or `least` is above `greatest`.

    Source: the values of DeepSpeed 0.19.8's `fixed_linear`. 0.19.6 rounds down below `least`, to 0 if that is below d.

    >>> f = fixed_linear(2, 10, 8, difficulty_step=2)
    >>> f, [f(t) for t in range(1, 11)]
    (fixed_linear(2, 10, 8, difficulty_step=2), [2, 4, 4, 6, 6, 8, 8, 10, 10, 10])
    """
    return _rising("fixed_linear", least, greatest, total, difficulty_step, 1)


@_difficulty
def fixed_root(least: int, greatest: int, total: int, *, degree: float = 2, difficulty_step: int = 1) -> Levels:
    """Grow from `least` to `greatest` in `total` steps like a root, fast at first; `fixed_linear` with (t/total)^(1/n).

    n is `degree`: 2 for the square root, 1 for a line.

    Raises:
        ScheduleError: as `fixed_linear`, or `degree` is not above 0.

    Source: the values of DeepSpeed 0.19.8's `fixed_root`; Platanios et al. 2019, arXiv:1903.09848, section 3.2.

    >>> f = fixed_root(8, 64, 20, difficulty_step=8)
    >>> [f(t) for t in (1, 2, 4, 5, 10, 19, 20)]
    [16, 24, 32, 32, 40, 56, 64]
    """
    if degree <= 0:
        _refuse("fixed_root", "the degree of a root is above 0", f"degree={degree!r}", "say, 2")
    return _rising("fixed_root", least, greatest, total, difficulty_step, degree)


def _rising(function: str, least: int, greatest: int, total: int, multiple: int, degree: float) -> Levels:
    if total < 1 or multiple < 1:
        got = f"total={total}, difficulty_step={multiple}"
        _refuse(function, "there are no steps to grow in, or of", got, "1 or more of each")
    if least > greatest:
        _refuse(function, "difficulty grows", f"least={least}, greatest={greatest}", "least <= greatest")
    lowest = -(-least // multiple) * multiple

    def level(t: int) -> int:
        try:
            value = math.floor((float(t) / total) ** (1.0 / degree) * (greatest - least) + least)
        except OverflowError:  # of a degree far below 1, long after the end
            return greatest
        return min(max(value - value % multiple, lowest), greatest)

    def changes() -> list[int]:
        end = total
        while level(end) < greatest and end < _LAST:  # where that is no multiple it comes late
            end *= 2
        return _increases(level, 1, end)

    return Levels(level, changes)


def _increases(level: Callable[[int], int], low: int, high: int) -> list[int]:
    """Return the steps in (low, high] at which a level that never falls is another than at the step before."""
    if level(low) == level(high):
        return []
    if high == low + 1:
        return [high]
    middle = (low + high) // 2
    return _increases(level, low, middle) + _increases(level, middle, high)


@_difficulty
def fixed_discrete(difficulties: Sequence[int], ends: Sequence[int]) -> Levels:
    """Have one difficulty for each stretch of steps: the first up to and with step `ends[0]`, the last without end.

    Raises:
        ScheduleError: difficulties that are no counts, not one end fewer, or ends that decrease.

    Source: the values of DeepSpeed 0.19.6's `fixed_discrete`.

    >>> f = fixed_discrete([1, 3, 2], [2, 5])
    >>> [f(t) for t in range(1, 8)]
    [1, 1, 3, 3, 3, 2, 2]
    """
    tuples = isinstance(difficulties, tuple) and isinstance(ends, tuple)
    if not tuples or not difficulties or not all(is_int(x, 0) for x in difficulties):
        _refuse("fixed_discrete", "no difficulties", repr(difficulties)[:80], "a list of counts, one or more")
    if len(ends) != len(difficulties) - 1 or not all(is_int(x, 0) for x in ends):
        got = f"{len(difficulties)} difficulties, ends={ends!r}"
        _refuse(
            "fixed_discrete", "stretches of steps and their ends do not match", got, "a step each, but for the last"
        )
    if list(ends) != sorted(ends):
        _refuse("fixed_discrete", "the ends of stretches decrease", repr(ends)[:80], "say, (100, 200)")
    return Levels(lambda t: difficulties[bisect_left(ends, t)], lambda: [end + 1 for end in ends])


@_difficulty
def stay_at(difficulty: Callable, greatest: int) -> Levels:
    """Follow another schedule until it has reached `greatest`, or more, and stay there: it is not asked any more.

    So DeepSpeed reads its schedules. It changes those that fall again, `fixed_discrete` and functions of your own. Of a
    function of your own it asks for all steps up to t, once.

    Args:
        difficulty: a schedule of difficulty, or any function `int -> int`.
        greatest: from which on nothing changes.

    Raises:
        ScheduleError: `difficulty` cannot be called, or `greatest` is not a count.

    Source: the values of DeepSpeed 0.19.6's `CurriculumScheduler.update_difficulty`, called in every step.

    >>> f = stay_at(fixed_discrete([1, 3, 2], [2, 5]), 3)
    >>> [f(t) for t in range(1, 8)]
    [1, 1, 3, 3, 3, 3, 3]
    """
    listed = _changes("stay_at", difficulty)
    candidates = itertools.count(1) if listed is None else iter([1, *listed()])
    asked, reached = 0, math.inf  # the last candidate that was asked, and the first step at `greatest`
    asking = threading.Lock()

    def level(t: int) -> int:
        nonlocal asked, reached
        with asking:
            while reached == math.inf and asked < t and (step := next(candidates, None)) is not None:
                asked = step
                if difficulty(step) >= greatest:
                    reached = step
        return difficulty(int(min(t, reached)))

    def changes() -> list[int]:
        level(_LAST)
        return [step for step in listed() if step <= reached] if listed is not None else []

    return Levels(level, None if listed is None else changes)


def _changes(function: str, difficulty: Any) -> Callable[[], Iterable[int]] | None:
    if not callable(difficulty):
        _refuse(function, "takes a schedule of difficulty", repr(difficulty)[:60], "a function int -> int")
    return difficulty.formula.changes if isinstance(difficulty, Difficulty) else None


@schedule
def by_tokens(curve: Callable, difficulty: Callable, full: int, *, until: int | None = None) -> Formula:
    """Return the value that a schedule has after as many tokens, counted in calls of `full` length.

        f(t) = curve(T(t) / full)        T(t) = the sum of min(difficulty(s), full) for s = 1 ... t;  t full for t < 0

    With lengths that grow from 64 to 1,024, 16 of the first updates move a learning rate as far as one of the last. T
    is exact, looked up in a table on the device of t. It counts updates, and calls whose update is skipped not.

    Args:
        curve: a schedule, or any function of t, a () float64 tensor.
        difficulty: tokens of a row in step s, as `fds.curriculum("seqlen", difficulty)` has them.
        full: tokens of a row that is not cut.
        until: step from which on a `difficulty` of your own stays what it is; it is asked for every step before.

    Raises:
        ScheduleError: what cannot be called, `full` is 0, a difficulty that is no count of 1 or more, or a function of
            your own without `until`.

    >>> linear = lambda t: t
    >>> f = by_tokens(linear, fixed_discrete([2, 4, 8], [4, 6]), 8)
    >>> [f(t) for t in (-1, 0, 1, 4, 5, 6, 7, 9)]
    [-1.0, 0.0, 0.25, 1.0, 1.5, 2.0, 3.0, 5.0]
    """
    changes = _changes("by_tokens", difficulty)
    if not callable(curve) or full < 1:
        _refuse("by_tokens", "takes a schedule and a length", f"{curve!r:.40}, {full}", "a function of t, 1 or more")
    if changes is None and until is None:
        got, want = f"{difficulty!r:.60} without `until`", "until=the step from which on it is the same"
        _refuse("by_tokens", "nobody knows where a function of your own ends", got, want)
    starts = [1, *(range(2, (until or 0) + 1) if changes is None else changes())]
    lengths = [difficulty(step) for step in starts]
    bad = next((pair for pair in zip(starts, lengths, strict=True) if not is_int(pair[1], 1)), None)
    if bad is not None:
        _refuse("by_tokens", "a row has no such length", f"difficulty({bad[0]}) = {bad[1]!r}", "an int, 1 or more")
    lengths = [min(length, full) for length in lengths]
    pieces = zip(itertools.pairwise(starts), lengths[:-1], strict=True)
    before = [0, *itertools.accumulate((end - start) * length for (start, end), length in pieces)]
    table = torch.tensor([[start - 1 for start in starts], lengths, before], dtype=torch.float64, device="cpu")
    there = functools.cache(table.to)  # the host waits for this copy: once for each device

    def formula(t: Tensor) -> Tensor:
        first, slopes, sums = table if t.device.type == "cpu" else there(t.device)
        at = torch.searchsorted(first, t, right=True).sub(1).clamp(min=0)
        # by `take`: an index of no dims is a number for torch, which waits for it
        tokens = torch.where(t < 0, t * full, sums.take(at) + (t - first.take(at)) * slopes.take(at))
        return value_at(curve, tokens / full)

    return formula


@_difficulty
def _layer_tokens(kept: Callable, full: int, layers: int, total: int) -> Levels:
    """Count the tokens that all layers compute of a row in call t, which keeps `kept(t - 1)` in some layers."""
    changes = _changes("by_layer_tokens", kept)

    def of(t: int) -> int:
        number = kept(t - 1)
        if not is_int(number, 1):
            _refuse("by_layer_tokens", "no number of tokens", f"kept({t - 1}) = {number!r:.60}", "an int, 1 or more")
        return layers * min(number, full) + (total - layers) * full

    return Levels(of, None if changes is None else lambda: [2, *(step + 1 for step in changes())])


@schedule
def by_layer_tokens(
    curve: Callable, kept: Callable, full: int, *, layers: int, total: int, until: int | None = None
) -> Formula:
    """Return the value that a schedule has after as many tokens of layers, counted in calls in which none is dropped.

        f(t) = curve(t - (layers / total) D(t) / full),   D(t) = the sum of max(full - kept(s), 0) for s = 0 ... t - 1

    So a learning rate follows what `fds.random_ltd(..., kept)` has layers compute: it falls as late as their tokens are
    consumed. It counts updates, and calls whose update is skipped not.

    Args:
        curve: a schedule, or any function of t, a () float64 tensor.
        kept: tokens of a row that the layers keep after t calls, as `fds.random_ltd` has them.
        full: tokens of a row.
        layers: how many layers keep some.
        total: how many layers there are.
        until: call from which on a function of your own stays what it is.

    Raises:
        ScheduleError: as `by_tokens`, or no `layers`, or more than `total`.

    >>> f = by_layer_tokens(lambda t: t, fixed_linear(4, 8, 4), 8, layers=2, total=4)
    >>> [f(t) for t in (0, 1, 2, 4, 5)]  # 4, 5, 6, 7, 8 of 8 tokens in half of the layers
    [0.0, 0.75, 1.5625, 3.375, 4.375]
    """
    if not 0 < layers <= total:
        _refuse("by_layer_tokens", "some of all layers keep tokens", f"layers={layers}, total={total}", "1 ... total")
    tokens = _layer_tokens(kept, full, layers, total)
    return by_tokens(curve, tokens, full * total, until=None if until is None else until + 1).formula
