"""Contenders side by side: alternating pairs, an interval, an A/A run, peak memory, and whether a claim is met."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from benchmarks import memory
from benchmarks.memory import Memory

Call = Callable[[], Tensor]

PAIRS_PER_MAKING = 10  # then all are made anew: where the allocator happens to put a contender is part of the noise


@attrs.frozen
class Contender:
    """A way to do the work. `make()` makes everything anew and returns a call that does one unit of it.

    A call returns a tensor that shows that the work was done: a loss, an output.
    """

    name: str
    make: Callable[[], Call]


@attrs.frozen
class Row:
    """One comparison, and what is claimed of it: None where it only informs."""

    contender: Contender
    beside: Contender
    time_at_most: float | None = None
    memory_at_most: float | None = None


@attrs.frozen
class Series:
    """The seconds of one call, pair by pair."""

    contender: tuple[float, ...]
    beside: tuple[float, ...]

    @property
    def ratios(self) -> np.ndarray:
        """The time of the contender over that of the one beside it, (pairs,)."""
        return np.array(self.contender) / np.array(self.beside)

    @property
    def ratio(self) -> float:
        """The median over pairs."""
        return float(np.median(self.ratios))

    def interval(self, *, draws: int = 10_000) -> tuple[float, float]:
        """Return the 95% bootstrap interval of `ratio`: the same for the same times."""
        return _interval(self, draws)

    def reaches(self, at_most: float | None) -> bool | None:
        """Whether the interval reaches down to a claim; None where nothing is claimed."""
        return None if at_most is None else self.interval()[0] <= at_most

    def medians_ms(self) -> tuple[float, float]:
        """Return the median milliseconds of the contender and of the one beside it."""
        return 1e3 * statistics.median(self.contender), 1e3 * statistics.median(self.beside)


@functools.lru_cache(maxsize=4096)  # tables of a thousand series are written again and again while more are measured
def _interval(series: Series, draws: int) -> tuple[float, float]:
    ratios, chance = series.ratios, np.random.default_rng(0)
    medians = np.median(chance.choice(ratios, (draws, len(ratios))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


@attrs.frozen
class Result:
    """A row, measured."""

    row: Row
    time: Series
    memory: Memory
    beside_memory: Memory
    agreement: str  # do both do the same work?

    @property
    def memory_ratio(self) -> float:
        """Peak bytes over peak bytes."""
        return self.memory.peak_bytes / self.beside_memory.peak_bytes

    @property
    def time_met(self) -> bool | None:
        """Whether the interval reaches down to the claim; None where nothing is claimed."""
        return self.time.reaches(self.row.time_at_most)

    @property
    def memory_met(self) -> bool | None:
        """Whether the ratio of peaks is at most the claim; None where nothing is claimed."""
        claim = self.row.memory_at_most
        return None if claim is None else self.memory_ratio <= claim


@attrs.frozen
class Comparison:
    """All rows measured, and each contender that others stand beside measured against itself (A/A)."""

    results: tuple[Result, ...]
    itself: tuple[tuple[Contender, Series], ...]
    calls: int  # a timing's

    @property
    def met(self) -> bool:
        """Whether every claim is met."""
        return not any(met is False for r in self.results for met in (r.time_met, r.memory_met))


def compare(
    rows: Sequence[Row],
    *,
    device: torch.device | None = None,
    pairs: int = 20,
    most: int = 200,
    width: float = 0.01,
    warm_up: int = 3,
    calls: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Check that contenders agree, measure their memory, then time them in alternating pairs.

    Args:
        rows: what to compare with what.
        device: where the work is done: its kernels are waited for, its allocator is asked.
        pairs: timings of each pair, at least.
        most: timings of each pair, at most.
        width: of every interval, at which timing ends before `most`.
        warm_up: calls of each contender after it is made, not timed.
        calls: calls in one timing, for work of less than a millisecond.
        progress: is told what is going on.
    """
    device = device or torch.device("cpu")
    references = list(dict.fromkeys(row.beside for row in rows))

    progress("do the contenders agree?")
    agreements = [agreement(row.contender, row.beside) for row in rows]

    progress("memory")
    everyone = dict.fromkeys([*references, *(row.contender for row in rows)])
    peaks = {one: memory.measure(one.make, calls=4, device=device) for one in everyone}

    duels = [*((row.contender, row.beside) for row in rows), *((one, one) for one in references)]
    series = timed(
        duels, device=device, pairs=pairs, most=most, width=width, warm_up=warm_up, calls=calls, progress=progress
    )
    results = [
        Result(row, s, peaks[row.contender], peaks[row.beside], agrees)
        for row, s, agrees in zip(rows, series, agreements, strict=False)
    ]
    return Comparison(tuple(results), tuple(zip(references, series[len(rows) :], strict=True)), calls)


def agreement(one: Contender, other: Contender, *, calls: int = 5) -> str:
    """Return in words how far apart the values of two contenders are in their first calls."""
    a, b = one.make(), other.make()
    values = [(a().detach().clone(), b().detach().clone()) for _ in range(calls)]
    if all(torch.equal(x, y) for x, y in values):
        return "bit for bit"
    apart = max(float((x.double() - y.double()).abs().max()) for x, y in values)
    return f"to {apart:.2g}"


def timed(
    duels: Sequence[tuple[Contender, Contender]],
    *,
    device: torch.device | None = None,
    pairs: int = 20,
    most: int = 200,
    width: float = 0.01,
    warm_up: int = 3,
    calls: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Series]:
    """Return the times of each duel, in alternating pairs; arguments as in `compare`."""
    device = device or torch.device("cpu")
    times: list[list[tuple[float, float]]] = [[] for _ in duels]
    while True:
        made = {one: one.make() for _, one in duels}  # one for all that stand beside it
        calls_of = [(one.make(), made[other]) for one, other in duels]
        gc.collect()
        gc.disable()
        try:
            for call in (*made.values(), *(call for call, _ in calls_of)):
                for _ in range(warm_up):
                    call()
            for _ in range(PAIRS_PER_MAKING):
                flip = len(times[0]) % 2 == 1
                for (call, other), kept in zip(calls_of, times, strict=True):
                    second = seconds(other, calls, device) if flip else None
                    first = seconds(call, calls, device)
                    kept.append((first, seconds(other, calls, device) if second is None else second))
                if len(times[0]) >= most:
                    break
        finally:
            gc.enable()
        series = [Series(*zip(*kept, strict=True)) for kept in times]
        intervals = [s.interval() for s in series]
        widest = max(high - low for low, high in intervals)
        progress(
            f"{len(times[0])} pairs, widest interval {widest:.4f}, ratios " + " ".join(f"{s.ratio:.4f}" for s in series)
        )
        if len(times[0]) >= most or (len(times[0]) >= pairs and widest <= width):
            return series
        del made, calls_of, call, other


def in_turns(calls: Mapping[str, Call], rounds: int, beside: str) -> dict[str, Series]:
    """Return the times of all calls but `beside`, each beside it: all take their turn, once a round, after two calls.

    For contenders of which each holds a large model, so that they are made once. The order turns from round to round.
    """
    device, times = torch.device("cpu"), {name: list[float]() for name in calls}
    for round_ in range(-2, rounds):
        for name in list(calls) if round_ % 2 else list(calls)[::-1]:
            took = seconds(calls[name], 1, device)
            if round_ >= 0:
                times[name].append(took)
    return {name: Series(tuple(mine), tuple(times[beside])) for name, mine in times.items() if name != beside}


def wait(device: torch.device) -> None:
    """Wait until a GPU has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Call, calls: int, device: torch.device) -> float:
    """Return the seconds of one call of some in a row, the device waited for at the end."""
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    wait(device)
    return (time.perf_counter() - start) / calls
