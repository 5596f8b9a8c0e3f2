"""`greedy`: every rank, whenever it is free, does the most urgent work that is ready and fits into memory."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import attrs

from fds.plans.schedules.letters import LetterRows, Times


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
