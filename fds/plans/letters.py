"""Letters: plans of one stage per rank as strings, which a search changes and times quickly.

A row is a string of F, B and W, whose n-th F is the forward of microbatch n, and so on, so that moving a letter keeps
the microbatches in order.
"""

from __future__ import annotations

import attrs

from fds.plans.plan import Action, Op, Plan
from fds.plans.simulator import Costs

LetterRows = tuple[str, ...]

_OPS = {"F": Op.FORWARD, "B": Op.BACKWARD_INPUT, "W": Op.BACKWARD_WEIGHT}
_LETTERS = {Op.FORWARD: "F", Op.BACKWARD_INPUT: "B", Op.BACKWARD_WEIGHT: "W", Op.BACKWARD: "BW"}


def plan_of(rows: LetterRows) -> Plan:
    """Return the plan of these rows.

    >>> plan_of(("FFBWBW", "FBFBWW"))
    0: 0F0 0F1 0B0 0W0 0B1 0W1
    1: 1F0 1B0 1F1 1B1 1W0 1W1
    """
    actions_of = []
    for stage, row in enumerate(rows):
        counts = dict.fromkeys(_OPS, 0)
        actions = []
        for letter in row:
            actions.append(Action(stage, _OPS[letter], counts[letter]))
            counts[letter] += 1
        actions_of.append(tuple(actions))
    return Plan(tuple(actions_of))


def letters_of(plan: Plan) -> LetterRows:
    """Return the letters of a plan of one stage a rank, with microbatches in order; BW becomes B and W."""
    return tuple("".join(_LETTERS[action.op] for action in row) for row in plan.rows)


def fits(row: str, room: float) -> bool:
    """Return whether each W is after its B, each B after its F, and at most `room` microbatches are live."""
    f = b = w = 0
    for op in row:
        f, b, w = f + (op == "F"), b + (op == "B"), w + (op == "W")
        if not w <= b <= f or f - w > room:
            return False
    return True


@attrs.frozen
class Times:
    """The time of each operation per rank, and of a message between a rank and the next."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    message: tuple[float, ...]

    @classmethod
    def of(cls, costs: Costs, num_ranks: int) -> Times:
        """Return the times with one stage per rank. Raises `PlanError` if a stage has no cost."""
        at = lambda name: tuple(costs.at(name, stage) for stage in range(num_ranks))
        message = tuple(costs.message(stage) for stage in range(num_ranks - 1))
        return cls(at("forward"), at("backward_input"), at("backward_weight"), message)

    @property
    def busy(self) -> tuple[float, ...]:
        """The computing time of each rank for one microbatch."""
        return tuple(map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True)))

    def round_trip(self, rank: int) -> float:
        """Return the shortest time from the start of a microbatch's forward on a rank to the end of its B there."""
        computed = sum(self.forward[rank:]) + sum(self.backward_input[rank:])
        return computed + 2 * sum(self.message[rank:])

    def least(self, num_microbatches: int) -> float:
        """Return a lower bound on the time of plans with one stage per rank."""
        bounds = []
        for rank, busy in enumerate(self.busy):
            head = sum(self.forward[:rank]) + sum(self.message[:rank])
            tail = sum(self.backward_input[:rank]) + sum(self.message[:rank])
            until_b = num_microbatches * (self.forward[rank] + self.backward_input[rank])
            bounds += [head + num_microbatches * busy, head + until_b + tail + self.backward_weight[0]]
        return max(bounds)


@attrs.frozen
class Timed:
    """When each letter of each row starts and ends."""

    rows: LetterRows
    starts: tuple[list[float], ...]
    ends: tuple[list[float], ...]

    @property
    def makespan(self) -> float:
        """The time at which the last letter ends."""
        return max(row[-1] for row in self.ends)

    @property
    def score(self) -> tuple[float, float, float]:
        """The order of quality, lowest best: the makespan, then the sums of the ends of ranks and of their Bs."""
        backwards = (
            end
            for row, ends in zip(self.rows, self.ends, strict=True)
            for op, end in zip(row, ends, strict=True)
            if op == "B"
        )
        return self.makespan, sum(row[-1] for row in self.ends), sum(backwards)


def timed(times: Times, rows: LetterRows) -> Timed | None:
    """Return the times that `simulate` gives, bit for bit, ten times as fast; None if the plan deadlocks.

    Rows must pass `fits`.
    """
    last = len(rows) - 1
    starts: tuple[list[float], ...] = tuple([] for _ in rows)
    ends: tuple[list[float], ...] = tuple([] for _ in rows)
    inputs: list[list[float]] = [[0.0] * row.count("F") if r == 0 else [] for r, row in enumerate(rows)]
    gradients: list[list[float]] = [[] for _ in rows]  # when they arrive
    counts = [[0, 0] for _ in rows]  # of F and B
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            mine, clock = ends[rank], ends[rank][-1] if ends[rank] else 0.0
            for op in row[len(mine) :]:
                start = clock
                if op != "W":
                    arrived, number = (inputs, counts[rank][0]) if op == "F" else (gradients, counts[rank][1])
                    if number == len(arrived[rank]):
                        break
                    start = max(clock, arrived[rank][number])
                    counts[rank][op == "B"] += 1
                if op == "F":
                    clock = start + times.forward[rank]
                    if rank == last:
                        gradients[rank].append(clock)
                    else:
                        inputs[rank + 1].append(clock + times.message[rank])
                elif op == "B":
                    clock = start + times.backward_input[rank]
                    if rank > 0:
                        gradients[rank - 1].append(clock + times.message[rank - 1])
                else:
                    clock = start + times.backward_weight[rank]
                starts[rank].append(start)
                mine.append(clock)
                progress = True
    if any(len(mine) < len(row) for mine, row in zip(ends, rows, strict=True)):
        return None
    return Timed(rows, starts, ends)
