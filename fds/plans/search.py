"""Searched: the best schedule found for measured, unequal costs within a memory bound.

First the known schedules of one stage per rank that fit the bound are tried; then greedy ones over a small grid of
preferences; then the best of them are improved by moves on a critical path, with a bounded number of simulations. The
search is deterministic: the same costs give the same plan.

Time:   from 0 to the last end, at most that of gpipe, one_f_one_b, zb_h1 and zb_h2 if these fit
Live:   what the bound allows
Source: Qi et al. 2024, arXiv:2401.10241, section 3, for greedy ranks with preferences that are searched over;
        van Laarhoven, Aarts and Lenstra 1992, for moves on a critical path
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

import attrs

from fds.errors import PlanError
from fds.plans.letters import LetterRows, Timed, Times, fits, letters_of, plan_of, timed
from fds.plans.plan import Plan
from fds.plans.schedules import check_sizes, gpipe, one_f_one_b, zb_h1, zb_h2
from fds.plans.simulator import Costs, costs_by_stage, simulate
from fds.plans.timeline import Timeline

Bound = float | Sequence[float] | None

_IMPROVED = 3  # number of plans to improve
_ACTIONS = 1_000_000  # number of actions to time for each of them: half a second


@attrs.frozen
class Searched:
    """The schedule for these costs and this memory bound."""

    costs: Costs
    memory_bound: float | tuple[float, ...] | None

    def __call__(self, num_ranks: int, num_microbatches: int) -> Plan:
        check_sizes("searched", num_ranks, num_microbatches)
        bounds = self._bounds(num_ranks)
        search = _Search(self.costs, bounds, self._room(bounds), num_microbatches)
        return search.best()

    def _bounds(self, num_ranks: int) -> list[float]:
        bound = math.inf if self.memory_bound is None else self.memory_bound
        bounds: list[float] = [bound] * num_ranks if isinstance(bound, int | float) else list(bound)
        if len(bounds) != num_ranks:
            raise PlanError(
                "there is not one bound per rank",
                where="searched",
                got=f"{len(bounds)} bounds",
                want=f"one number, or {num_ranks}",
            )
        return bounds

    def _room(self, bounds: list[float]) -> list[float]:
        """Return the number of microbatches that fit on each rank. Raises `PlanError` if not even one fits."""
        sizes = [self.costs.at("activation_bytes", rank) for rank in range(len(bounds))]
        if short := [rank for rank, (size, bound) in enumerate(zip(sizes, bounds, strict=True)) if not size <= bound]:
            got = ", ".join(f"{bounds[rank]:g} on rank {rank}" for rank in short)
            raise PlanError(
                "no plan fits the memory bound: a rank must hold one microbatch",
                where="searched",
                got=f"memory_bound of {got}",
                want=f"at least {max(sizes)!r} on all, or per rank {sizes}",
            )
        return [_fitting(size, bound) for size, bound in zip(sizes, bounds, strict=True)]


def searched(costs: Costs, memory_bound: Bound = None) -> Searched:
    """Return the schedule of one stage per rank that a search finds for these costs.

    The plan is the shortest found according to `simulate`; ties are broken by the smallest peak. Its time is at most
    that of gpipe, one_f_one_b, zb_h1 and zb_h2, if these fit; forwards, Bs and Ws of a stage keep the order of the
    microbatches. The schedule raises `PlanError` if a rank cannot hold one microbatch.

    Args:
        costs: the costs of the stages; from `LayerCosts`, `costs.by_stage(boundaries)`.
        memory_bound: the most memory that a rank may hold, in the unit of `costs.activation_bytes`: one number, one per
            rank, or None for no bound.

    >>> searched(Costs(backward_weight=2), memory_bound=2)(2, 3)
    0: 0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2
    1: 1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2
    """
    bound = memory_bound if memory_bound is None or isinstance(memory_bound, int | float) else tuple(memory_bound)
    return Searched(costs_by_stage(costs, "searched"), bound)


class _Search:
    """The plans tried so far."""

    def __init__(self, costs: Costs, bounds: list[float], room: list[float], num_microbatches: int):
        self.costs, self.bounds, self.room, self.m = costs, bounds, room, num_microbatches
        self.times = Times.of(costs, len(bounds))
        self.least = self.times.least(num_microbatches) * (1 + 1e-12)
        self.shortest = math.inf
        self.candidates: list[tuple[Plan, Timeline]] = []
        self.seen: set[LetterRows] = set()

    def best(self) -> Plan:
        """Search, and return the best plan."""
        self.candidates = list(self.known_plans())  # unchanged too, since BW rounds differently from B and W
        starts = [self.time(letters_of(plan)) for plan, _ in self.candidates]
        remaining = iter(preferences(self.times))
        while self.shortest > self.least and (preference := next(remaining, None)):
            starts.append(self.time(greedy(self.times, self.m, self.room, preference)))
        starts = sorted({timing.rows: timing for timing in starts if timing}.values(), key=lambda timing: timing.score)
        ends = [self.improve(timing) for timing in starts[:_IMPROVED]]
        for plan in [plan_of(timing.rows) for timing in [*ends, *starts] if timing.makespan <= self.shortest]:
            self.candidates.append((plan, simulate(plan, self.costs)))
        quality = lambda pair: (pair[1].makespan, max(pair[1].peak_bytes), sum(pair[1].peak_bytes))
        return min(self.candidates, key=quality)[0]

    def known_plans(self) -> Iterator[tuple[Plan, Timeline]]:
        """Yield the plans of the known schedules that fit the bound."""
        for schedule in (one_f_one_b, zb_h1, zb_h2, gpipe):
            plan = schedule(len(self.bounds), self.m)
            line = simulate(plan, self.costs)
            if all(peak <= bound for peak, bound in zip(line.peak_bytes, self.bounds, strict=True)):
                yield plan, line

    def time(self, rows: LetterRows) -> Timed | None:
        """Time rows; None if they deadlock."""
        self.seen.add(rows)
        timing = timed(self.times, rows)
        if timing is not None:
            self.shortest = min(self.shortest, timing.makespan)
        return timing

    def improve(self, timing: Timed) -> Timed:
        """Move operations on critical paths as long as it helps and the budget lasts."""
        budget = _ACTIONS // sum(map(len, timing.rows))
        better: Timed | None = timing
        while better is not None and self.shortest > self.least:
            timing, better = better, None
            for moved in self.moves(timing):
                if moved in self.seen:
                    continue
                budget -= 1
                if budget < 0:
                    break
                other = self.time(moved)
                if other is not None and other.score < timing.score:
                    better = other
                    break
        return timing

    def moves(self, timing: Timed) -> Iterator[LetterRows]:
        """Yield rows with two neighbours on the critical path swapped, or one of its Ws moved to a later gap."""
        path = _critical(timing)
        for rank, i in path:
            row, starts, ends = timing.rows[rank], timing.starts[rank], timing.ends[rank]
            candidates = []
            if (rank, i - 1) in path and row[i - 1] != row[i]:
                candidates.append(row[: i - 1] + row[i] + row[i - 1] + row[i + 1 :])
            if row[i] == "W":
                gap = next((j for j in range(i + 1, len(row)) if starts[j] > ends[j - 1]), len(row))
                candidates += [row[:i] + row[i + 1 : j] + "W" + row[j:] for j in dict.fromkeys((gap, len(row)))]
            for moved in candidates:
                if moved != row and fits(moved, self.room[rank]):
                    yield (*timing.rows[:rank], moved, *timing.rows[rank + 1 :])


def _critical(timing: Timed) -> dict[tuple[int, int], None]:
    """Return (rank, index) of the letters of a critical path, from the last one back."""
    places = {op: [[i for i, it in enumerate(row) if it == op] for row in timing.rows] for op in "FB"}
    rank = max(range(len(timing.rows)), key=lambda r: timing.ends[r][-1])
    at: tuple[int, int] | None = (rank, len(timing.rows[rank]) - 1)
    path: dict[tuple[int, int], None] = {}
    while at is not None:
        path[at] = None
        rank, i = at
        op = timing.rows[rank][i]
        if i > 0 and timing.ends[rank][i - 1] >= timing.starts[rank][i]:
            at = (rank, i - 1)
            continue
        beside = rank - 1 if op == "F" else rank + 1  # it waits for a message, or is the first letter
        number = timing.rows[rank][:i].count(op)
        at = (beside, places[op][beside][number]) if op != "W" and 0 <= beside < len(timing.rows) else None
    return path


def _fitting(size: float, bound: float) -> float:
    """Return the largest number with `number * size <= bound` in floating point, as in the simulator."""
    if size == 0 or math.isinf(bound) or math.isinf(bound / size):
        return math.inf
    number = math.floor(bound / size) + 1
    while number * size > bound:
        number -= 1
    return number


@attrs.frozen
class Preference:
    """What a greedy rank chooses if it has a choice."""

    ahead: tuple[float, ...]  # per rank: most microbatches between F and B
    forward_first: bool  # if an F and a B are both ready
    weights: str  # do W "at once" if neither is ready, if it "fits" before the next one, or "late"


def preferences(times: Times) -> list[Preference]:
    """Return the preferences to try."""
    ranks = range(len(times.forward))
    period = max(times.busy) or 1.0
    to_hide = [math.ceil(times.round_trip(r) / period) for r in ranks]  # microbatches in flight
    p = len(ranks)
    aheads = [
        [p - r for r in ranks],
        to_hide,
        [n + 1 for n in to_hide],
        [math.ceil(1.5 * (p - r)) for r in ranks],
        [2 * (p - r) - 1 for r in ranks],
        [math.inf for _ in ranks],
    ]
    distinct = dict.fromkeys(tuple(float(max(n, 1)) for n in ahead) for ahead in aheads)
    return [Preference(a, first, w) for a in distinct for first in (False, True) for w in ("at once", "fits", "late")]


def greedy(times: Times, num_microbatches: int, room: Sequence[float], preference: Preference) -> LetterRows:
    """Return the row of every rank; `room` is the number of microbatches that fit on each rank, at least 1."""
    run = _Run(times, num_microbatches, room, preference)
    while run.wake_ups:
        now, rank = heapq.heappop(run.wake_ups)
        if run.free_at[rank] <= now and (op := run.choice(rank, now)):
            run.do(rank, op, now)
    return tuple("".join(row) for row in run.rows)


class _Run:
    """The state of all ranks at one time. It terminates: the last rank with a live microbatch can do its B or a W."""

    def __init__(self, times: Times, num_microbatches: int, room: Sequence[float], preference: Preference):
        self.times, self.m, self.room, self.preference = times, num_microbatches, room, preference
        p = len(times.forward)
        self.rows: list[list[str]] = [[] for _ in range(p)]
        self.counts = [{"F": 0, "B": 0, "W": 0} for _ in range(p)]
        self.free_at = [0.0] * p
        self.inputs: list[list[float]] = [[0.0] * num_microbatches, *([] for _ in range(p - 1))]  # when they arrive
        self.gradients: list[list[float]] = [[] for _ in range(p)]
        self.wake_ups = [(0.0, 0)]

    def choice(self, rank: int, now: float) -> str:
        """Return the operation that a free rank does now; "" to wait."""
        done, room = self.counts[rank], self.room[rank]
        f, b, w = done["F"], done["B"], done["W"]
        has_room = f - w < room
        next_f = _at(self.inputs[rank], f) if f < self.m and f - b < self.preference.ahead[rank] else math.inf
        next_b = _at(self.gradients[rank], b) if b < f else math.inf
        if next_b <= now and not (self.preference.forward_first and next_f <= now and has_room):
            return "B"
        if next_f <= now and has_room:
            return "F"
        if w == b:
            return ""
        if self.preference.weights == "at once" or next_f <= now or b == self.m:  # F needs room, or only W left
            return "W"
        soonest = min(next_b, next_f if has_room else math.inf)
        fits = now + self.times.backward_weight[rank] <= soonest
        return "W" if self.preference.weights == "fits" and fits else ""

    def do(self, rank: int, op: str, now: float) -> None:
        """Do an operation, and send its result."""
        times, last = self.times, len(self.rows) - 1
        self.rows[rank].append(op)
        self.counts[rank][op] += 1
        cost = {"F": times.forward, "B": times.backward_input, "W": times.backward_weight}[op]
        end = self.free_at[rank] = now + cost[rank]
        heapq.heappush(self.wake_ups, (end, rank))
        if op == "F" and rank == last:
            self.gradients[rank].append(end)
        elif op == "F":
            self.send(self.inputs, rank + 1, end + times.message[rank])
        elif op == "B" and rank > 0:
            self.send(self.gradients, rank - 1, end + times.message[rank - 1])

    def send(self, arrivals: list[list[float]], rank: int, when: float) -> None:
        """Add the arrival of a message."""
        arrivals[rank].append(when)
        heapq.heappush(self.wake_ups, (when, rank))


def _at(arrivals: list[float], number: int) -> float:
    return arrivals[number] if number < len(arrivals) else math.inf
