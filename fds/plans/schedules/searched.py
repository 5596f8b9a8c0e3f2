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

import math
from collections.abc import Iterator, Sequence

import attrs

from fds.errors import PlanError
from fds.plans.costs import Costs
from fds.plans.plan import Plan
from fds.plans.schedules.gpipe import gpipe
from fds.plans.schedules.greedy import greedy, preferences
from fds.plans.schedules.letters import LetterRows, Timed, Times, fits, letters_of, plan_of, timed
from fds.plans.schedules.one_f_one_b import one_f_one_b
from fds.plans.schedules.sizes import check_sizes
from fds.plans.schedules.zb_h1 import zb_h1
from fds.plans.schedules.zb_h2 import zb_h2
from fds.plans.simulator import costs_by_stage, simulate
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
        starts = sorted({one.rows: one for one in starts if one}.values(), key=lambda one: one.score)
        ends = [self.improve(one) for one in starts[:_IMPROVED]]
        for plan in [plan_of(one.rows) for one in [*ends, *starts] if one.makespan <= self.shortest]:
            self.candidates.append((plan, simulate(plan, self.costs)))
        quality = lambda one: (one[1].makespan, max(one[1].peak_bytes), sum(one[1].peak_bytes))
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
        one = timed(self.times, rows)
        if one is not None:
            self.shortest = min(self.shortest, one.makespan)
        return one

    def improve(self, one: Timed) -> Timed:
        """Move operations on critical paths as long as it helps and the budget lasts."""
        budget = _ACTIONS // sum(map(len, one.rows))
        better: Timed | None = one
        while better is not None and self.shortest > self.least:
            one, better = better, None
            for moved in self.moves(one):
                if moved in self.seen:
                    continue
                budget -= 1
                if budget < 0:
                    break
                other = self.time(moved)
                if other is not None and other.score < one.score:
                    better = other
                    break
        return one

    def moves(self, one: Timed) -> Iterator[LetterRows]:
        """Yield rows with two neighbours on the critical path swapped, or one of its Ws moved to a later gap."""
        path = _critical(one)
        for rank, i in path:
            row, starts, ends = one.rows[rank], one.starts[rank], one.ends[rank]
            candidates = []
            if (rank, i - 1) in path and row[i - 1] != row[i]:
                candidates.append(row[: i - 1] + row[i] + row[i - 1] + row[i + 1 :])
            if row[i] == "W":
                gap = next((j for j in range(i + 1, len(row)) if starts[j] > ends[j - 1]), len(row))
                candidates += [row[:i] + row[i + 1 : j] + "W" + row[j:] for j in dict.fromkeys((gap, len(row)))]
            for moved in candidates:
                if moved != row and fits(moved, self.room[rank]):
                    yield (*one.rows[:rank], moved, *one.rows[rank + 1 :])


def _critical(one: Timed) -> dict[tuple[int, int], None]:
    """Return (rank, index) of the letters of a critical path, from the last one back."""
    places = {op: [[i for i, it in enumerate(row) if it == op] for row in one.rows] for op in "FB"}
    rank = max(range(len(one.rows)), key=lambda r: one.ends[r][-1])
    at: tuple[int, int] | None = (rank, len(one.rows[rank]) - 1)
    path: dict[tuple[int, int], None] = {}
    while at is not None:
        path[at] = None
        rank, i = at
        op = one.rows[rank][i]
        if i > 0 and one.ends[rank][i - 1] >= one.starts[rank][i]:
            at = (rank, i - 1)
            continue
        beside = rank - 1 if op == "F" else rank + 1  # it waits for a message, or is the first letter
        number = one.rows[rank][:i].count(op)
        at = (beside, places[op][beside][number]) if op != "W" and 0 <= beside < len(one.rows) else None
    return path


def _fitting(size: float, bound: float) -> float:
    """Return the largest number with `number * size <= bound` in floating point, as in the simulator."""
    if size == 0 or math.isinf(bound) or math.isinf(bound / size):
        return math.inf
    number = math.floor(bound / size) + 1
    while number * size > bound:
        number -= 1
    return number
