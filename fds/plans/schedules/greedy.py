"""Greedy rows: every rank, whenever it is free, takes the most urgent work that is there and that memory allows."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import attrs

from fds.plans.schedules.letters import Rows, Times


@attrs.frozen
class Taste:
    """What a greedy rank prefers, where there is a choice."""

    ahead: tuple[float, ...]  # per rank: at most that many microbatches between their F and their B
    forward_first: bool  # of an F and a B that are both there
    weights: str  # W "at once" where neither is there; where it "fits" before one comes; else "late"


def tastes(times: Times) -> list[Taste]:
    """Return the tastes to try."""
    ranks = range(len(times.forward))
    period = max(times.busy) or 1.0
    to_hide = [math.ceil(times.there_and_back(r) / period) for r in ranks]  # in flight, so that the slowest never waits
    p = len(ranks)
    aheads = [
        [p - r for r in ranks], to_hide, [n + 1 for n in to_hide], [math.ceil(1.5 * (p - r)) for r in ranks],
        [2 * (p - r) - 1 for r in ranks], [math.inf for _ in ranks],
    ]  # fmt: skip
    kept = dict.fromkeys(tuple(float(max(n, 1)) for n in ahead) for ahead in aheads)
    return [Taste(a, first, w) for a in kept for first in (False, True) for w in ("at once", "fits", "late")]


def greedy(times: Times, num_microbatches: int, room: Sequence[float], taste: Taste) -> Rows:
    """Return the row of every rank; `room` is how many microbatches fit each rank's memory, one at least."""
    run = _Run(times, num_microbatches, room, taste)
    while run.wake_ups:
        now, rank = heapq.heappop(run.wake_ups)
        if run.free_at[rank] <= now and (op := run.choice(rank, now)):
            run.do(rank, op, now)
    return tuple("".join(row) for row in run.rows)


class _Run:
    """The ranks at one moment. It ends: the last rank that holds anything can do its B, or a W that frees memory."""

    def __init__(self, times: Times, num_microbatches: int, room: Sequence[float], taste: Taste):
        self.times, self.m, self.room, self.taste = times, num_microbatches, room, taste
        p = len(times.forward)
        self.rows: list[list[str]] = [[] for _ in range(p)]
        self.counts = [{"F": 0, "B": 0, "W": 0} for _ in range(p)]
        self.free_at = [0.0] * p
        self.inputs: list[list[float]] = [[0.0] * num_microbatches, *([] for _ in range(p - 1))]  # when they arrive
        self.gradients: list[list[float]] = [[] for _ in range(p)]
        self.wake_ups = [(0.0, 0)]

    def choice(self, rank: int, now: float) -> str:
        """Return what a free rank does now; nothing, if waiting is better."""
        done, room = self.counts[rank], self.room[rank]
        f, b, w = done["F"], done["B"], done["W"]
        has_room = f - w < room
        next_f = _at(self.inputs[rank], f) if f < self.m and f - b < self.taste.ahead[rank] else math.inf
        next_b = _at(self.gradients[rank], b) if b < f else math.inf
        if next_b <= now and not (self.taste.forward_first and next_f <= now and has_room):
            return "B"
        if next_f <= now and has_room:
            return "F"
        if w == b:
            return ""
        if self.taste.weights == "at once" or next_f <= now or b == self.m:  # an F waits for the room, or all are W
            return "W"
        soonest = min(next_b, next_f if has_room else math.inf)
        fits = now + self.times.backward_weight[rank] <= soonest
        return "W" if self.taste.weights == "fits" and fits else ""

    def do(self, rank: int, op: str, now: float) -> None:
        """Do it, and wake who may go on by it."""
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
        """Note when a message arrives."""
        arrivals[rank].append(when)
        heapq.heappush(self.wake_ups, (when, rank))


def _at(arrivals: list[float], number: int) -> float:
    return arrivals[number] if number < len(arrivals) else math.inf
