"""The simulator: a plan and what its actions cost, to when each of them runs and how much is held.

Each rank does its row in order. An action starts when the rank has done the one before and what it needs is there:

    F(stage, i)     needs F(stage - 1, i)
    B or BW         needs F(stage, i), and B or BW(stage + 1, i)
    W(stage, i)     needs B(stage, i)

What comes from another rank takes `costs.message` to arrive. Sends, receives and all else that lowering adds take
the rank no time: a message leaves when its send is reached, whether or not its receive is posted by then, and a
computation waits for the message, not the receive.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fds.errors import PlanError
from fds.plans.actions import RECVS, SENDS, Action, Op
from fds.plans.costs import Costs
from fds.plans.plan import Plan, Rows
from fds.plans.timeline import Event, Timeline, peaks

Done = tuple[int, str, int, int]  # rank, what, stage, microbatch: what another action may wait for
_WORDS = {
    Op.FORWARD: "F", Op.BACKWARD_INPUT: "B", Op.BACKWARD: "B", Op.BACKWARD_WEIGHT: "W",  # for who waits, BW is a B
    Op.SEND_ACTIVATION: "SEND_ACT", Op.SEND_GRAD: "SEND_GRAD",
    Op.RECV_ACTIVATION: "RECV_ACT", Op.RECV_GRAD: "RECV_GRAD",
}  # fmt: skip


def simulate(plan: Plan | Rows, costs: Costs = Costs()) -> Timeline:  # noqa: B008 (a frozen record)
    """Return when each action runs, in the unit of the costs, and each rank's peak bytes and microbatches.

    The plan may be as a schedule gives it, or lowered. A receive is an event from where it is posted to where its
    message has arrived. Raises `PlanError` where the plan gets stuck, and where stages have no costs or costs no stage.

    >>> line = simulate([["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]])
    >>> line.makespan, round(line.bubble_fraction, 3), line.peak_live
    (9.0, 0.333, (2, 1))
    """
    run = _Run(Plan.of(plan), costs_by_stage(costs, "simulate"))
    run.to_the_end()
    return run.timeline()


def costs_by_stage(costs: Any, where: str) -> Costs:
    """Return the costs if they are those of stages. Raises `PlanError`."""
    if not isinstance(costs, Costs):
        hint = "costs.by_stage(boundaries)" if hasattr(costs, "by_stage") else ""
        raise PlanError("these are no costs of stages", where=where, got=type(costs).__name__, want="plans.Costs",
                        hint=hint)  # fmt: skip
    return costs


def _refuse_costs_of_more_stages(costs: Costs, num_stages: int) -> None:
    for name in ("forward", "backward_input", "backward_weight", "activation_bytes", "message_bytes"):
        value = getattr(costs, name)
        if not isinstance(value, int | float) and len(value) > num_stages:
            raise PlanError("there are costs of more stages than the plan has", where=f"costs.{name}",
                            got=f"{len(value)} numbers", want=f"{num_stages}, or one for all")  # fmt: skip


class _Run:
    """How far each rank is. A rank goes on until something is missing, and then waits to be woken by its coming."""

    def __init__(self, plan: Plan, costs: Costs):
        _refuse_costs_of_more_stages(costs, plan.num_stages)
        self.plan, self.costs = plan, costs
        ranks, self.last = range(plan.num_ranks), plan.num_stages - 1
        self.holds = [{a.stage for a in row if a.op is Op.FORWARD} for row in plan.rows]
        self.lowered = any(a.op in SENDS or a.op in RECVS for row in plan.rows for a in row)
        self.delay = [costs.message(stage) for stage in range(self.last)]
        at = lambda name: [costs.at(name, stage) for stage in range(self.last + 1)]
        forward, b, w = at("forward"), at("backward_input"), at("backward_weight")
        both = [x + y for x, y in zip(b, w, strict=True)]
        self.cost = {Op.FORWARD: forward, Op.BACKWARD_INPUT: b, Op.BACKWARD_WEIGHT: w, Op.BACKWARD: both}
        self.clock = [0.0 for _ in ranks]
        self.starts: list[list[float]] = [[] for _ in ranks]
        self.ends: list[list[float]] = [[] for _ in ranks]
        self.done: dict[Done, float] = {}
        self.waiting: dict[Done, list[int]] = {}  # the ranks

    def to_the_end(self) -> None:
        """Run all rows. Raises `PlanError`."""
        ready = list(reversed(range(self.plan.num_ranks)))
        while ready:
            ready += self.advance(ready.pop())
        if any(len(ends) < len(row) for ends, row in zip(self.ends, self.plan.rows, strict=True)):
            raise self.stuck()

    def advance(self, rank: int) -> list[int]:
        """Run the row of a rank until something is missing; return the ranks that may go on by what was done."""
        row, starts, ends = self.plan.rows[rank], self.starts[rank], self.ends[rank]
        done, clock, woken = self.done, self.clock[rank], []
        while len(ends) < len(row):
            action = row[len(ends)]
            start = clock
            for need, delay in self.needs(rank, action):
                if need not in done:
                    self.waiting.setdefault(need, []).append(rank)
                    self.clock[rank] = clock
                    return woken
                start = max(start, done[need] + delay)
            stage, microbatch, word = action.stage, action.microbatch, _WORDS.get(action.op)
            cost = self.cost.get(action.op)
            clock = start if cost is None or stage is None else start + cost[stage]
            starts.append(start)
            ends.append(clock)
            if word is not None:
                key: Done = (rank, word, stage, microbatch)  # type: ignore
                done[key] = clock
                woken += self.waiting.pop(key, ())
        self.clock[rank] = clock
        return woken

    def needs(self, rank: int, action: Action) -> Iterator[tuple[Done, float]]:
        """Yield what an action waits for, and how long after that it is here."""
        op, stage, i = action.op, action.stage, action.microbatch
        if stage is None or i is None:
            return
        if op is Op.FORWARD:
            if stage > 0:
                yield from self.arrival(rank, "F", "ACT", stage, stage - 1, i)
        elif op is Op.BACKWARD_INPUT or op is Op.BACKWARD:
            yield (rank, "F", stage, i), 0.0
            if stage < self.last:
                yield from self.arrival(rank, "B", "GRAD", stage, stage + 1, i)
        elif op is Op.BACKWARD_WEIGHT or op is Op.SEND_GRAD:
            yield (rank, "B", stage, i), 0.0
        elif op is Op.SEND_ACTIVATION:
            yield (rank, "F", stage, i), 0.0

    def arrival(self, rank: int, word: str, thing: str, stage: int, other: int, i: int) -> Iterator[tuple[Done, float]]:
        """Yield what of the stage beside must be here: as it is on this rank, or once its message is."""
        if other in self.holds[rank]:
            yield (rank, word, other, i), 0.0
        elif not self.lowered:
            yield (self.plan.placement.get(other, -1), word, other, i), self.delay[min(stage, other)]
        else:
            yield (rank, f"RECV_{thing}", stage, i), 0.0
            yield self.sent(f"SEND_{thing}", stage, other, i)

    def sent(self, word: str, stage: int, other: int, i: int) -> tuple[Done, float]:
        """Return the send by the stage beside, and how long its message takes."""
        return (self.plan.placement.get(other, -1), word, other, i), self.delay[min(stage, other)]

    def received(self, action: Action, posted: float) -> float:
        """Return when the message of a receive is there. Raises `PlanError` where nobody sends it."""
        stage, i = action.stage, action.microbatch
        assert stage is not None and i is not None
        back = action.op is Op.RECV_GRAD
        other = stage + 1 if back else stage - 1
        if 0 <= other <= self.last:
            need, delay = self.sent("SEND_GRAD" if back else "SEND_ACT", stage, other, i)
            if need in self.done:
                return max(posted, self.done[need] + delay)
        raise PlanError("a message is received that nobody sends", got=str(action),
                        want=f"a {'SEND_GRAD' if back else 'SEND_ACT'} of microbatch {i} by stage {other}")  # fmt: skip

    def timeline(self) -> Timeline:
        """Return the events, and what is held."""
        rows = []
        for row, starts, ends in zip(self.plan.rows, self.starts, self.ends, strict=True):
            events = []
            for action, start, end in zip(row, starts, ends, strict=True):
                end = self.received(action, end) if action.op in RECVS else end
                events.append(Event(action, start, end))
            rows.append(tuple(events))
        bytes_of = lambda stage: self.costs.at("activation_bytes", stage)
        held = [peaks(row, bytes_of, trains=self.plan.trains) for row in rows]
        return Timeline(tuple(rows), tuple(b for b, _ in held), tuple(n for _, n in held))

    def stuck(self) -> PlanError:
        """Return the error that says who waits for what."""
        every = ((rank, action) for rank, row in enumerate(self.plan.rows) for action in row)
        all_of = {(_WORDS.get(a.op), a.stage, a.microbatch): (rank, a) for rank, a in every}
        lines = []
        for rank, (row, ends) in enumerate(zip(self.plan.rows, self.ends, strict=True)):
            if len(ends) == len(row):
                lines.append(f"rank {rank} is at its end")
                continue
            action = row[len(ends)]
            need = next(need for need, _ in self.needs(rank, action) if need not in self.done)
            _, word, stage, i = need
            other, wanted = all_of.get((word, stage, i), (None, f"{stage}{word}{i}"))
            where = "is nowhere in the plan" if other is None else f"is later in the row of rank {other}"
            lines.append(f"rank {rank} is at {action} and waits for {wanted}, which {where}")
        shown = lines if len(lines) <= 16 else [*lines[:16], f"and {len(lines) - 16} more"]
        return PlanError("the plan gets stuck: every rank that is not at its end waits", got="\n".join(shown),
                         want="each action after what it needs")  # fmt: skip
