"""`simulate`: from a plan and the costs of its actions, when each runs and how much memory is held.

Each rank does its row in order. An action starts when the previous one is done and its dependencies are there:

    F(stage, i)     needs F(stage - 1, i)
    B or BW         needs F(stage, i), and B or BW(stage + 1, i)
    W(stage, i)     needs B(stage, i)

A message from another rank takes `costs.message` to arrive. Sends, receives and everything else that lowering adds
take no time on the rank: a message leaves when its send is reached, even if its receive is not posted yet, and a
computation waits for the message, not for the receive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from fds.errors import PlanError, is_number
from fds.plans.plan import RECVS, SENDS, Action, Op, Plan, Rows
from fds.plans.timeline import Event, Timeline, peaks

PerStage = float | Sequence[float]


def _check_numbers(_: object, field: attrs.Attribute, value: PerStage) -> None:
    values = [value] if isinstance(value, int | float) else list(value)
    if not values or any(isinstance(v, bool) or not v >= 0 or math.isinf(v) for v in values):
        raise PlanError(
            "a cost is negative or not finite", where=field.name, got=repr(value), want="one number, or one per stage"
        )


def _per_stage(default: float) -> Any:
    as_tuple = lambda value: value if isinstance(value, int | float) else tuple(value)
    return attrs.field(default=default, converter=as_tuple, validator=_check_numbers)


@attrs.frozen
class Costs:
    """The cost of one microbatch at each stage: one number for all stages, or one per stage.

    Times share any unit (seconds if measured), and so do bytes: with `activation_bytes=1` the peak of bytes is the peak
    number of microbatches.
    """

    forward: PerStage = _per_stage(1.0)
    backward_input: PerStage = _per_stage(1.0)
    backward_weight: PerStage = _per_stage(1.0)
    activation_bytes: PerStage = _per_stage(1.0)
    message_bytes: PerStage = _per_stage(0.0)
    latency: float = attrs.field(default=0.0, validator=_check_numbers)  # of a message between two ranks
    bytes_per_second: float = attrs.field(default=math.inf)  # of a message between two ranks

    @bytes_per_second.validator  # type: ignore[attr-defined]
    def _check_bandwidth(self, _field: object, value: float) -> None:
        if not is_number(value) or not value > 0:
            raise PlanError(
                "the bandwidth is not positive", where="bytes_per_second", got=repr(value), want="a number above 0"
            )

    def at(self, name: str, stage: int) -> float:
        """Return a cost at a stage: `costs.at("forward", 2)`. Raises `PlanError` for a stage without cost."""
        value = getattr(self, name)
        if isinstance(value, int | float):
            return value
        if not 0 <= stage < len(value):
            raise PlanError(
                "there is no cost for this stage",
                where=f"costs.{name}",
                got=f"{len(value)} numbers",
                want=f"at least {stage + 1}, one for each stage, or one number for all",
            )
        return value[stage]

    def message(self, stage: int) -> float:
        """Return the time of a message between this stage and the next, on different ranks."""
        return self.latency + self.at("message_bytes", stage) / self.bytes_per_second


RankItem = tuple[int, str, int, int]  # (rank, operation, stage, microbatch) that another action may wait for
Wait = tuple[RankItem, float]  # an item, and the time that it takes to arrive
_WORDS = {
    Op.FORWARD: "F",
    Op.BACKWARD_INPUT: "B",
    Op.BACKWARD: "B",
    Op.BACKWARD_WEIGHT: "W",  # a BW counts as B
    Op.SEND_ACTIVATION: "SEND_ACT",
    Op.SEND_GRAD: "SEND_GRAD",
    Op.RECV_ACTIVATION: "RECV_ACT",
    Op.RECV_GRAD: "RECV_GRAD",
}


def simulate(plan: Plan | Rows, costs: Costs = Costs()) -> Timeline:
    """Return when each action runs, in the unit of the costs, and each rank's peak bytes and microbatches.

    The plan may be lowered or not. A receive is an event from its posting to the arrival of its message. Raises
    `PlanError` if the plan deadlocks, and if the numbers of stages and of costs differ.

    >>> line = simulate([["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]])
    >>> line.makespan, round(line.bubble_fraction, 3), line.peak_live
    (9.0, 0.333, (2, 1))
    """
    run = _Run(Plan.of(plan), costs_by_stage(costs, "simulate"))
    run.to_the_end()
    return run.timeline()


def costs_by_stage(costs: Any, where: str) -> Costs:
    """Return the costs. Raises `PlanError` unless they are `Costs`."""
    if not isinstance(costs, Costs):
        hint = "costs.by_stage(boundaries)" if hasattr(costs, "by_stage") else ""
        raise PlanError("not costs of stages", where=where, got=type(costs).__name__, want="plans.Costs", hint=hint)
    return costs


def _check_num_costs(costs: Costs, num_stages: int) -> None:
    for name in ("forward", "backward_input", "backward_weight", "activation_bytes", "message_bytes"):
        value = getattr(costs, name)
        if not isinstance(value, int | float) and len(value) > num_stages:
            raise PlanError(
                "there are more costs than stages",
                where=f"costs.{name}",
                got=f"{len(value)} numbers",
                want=f"{num_stages}, or one for all",
            )


class _Run:
    """The progress of each rank. A rank runs until an item is missing, and continues when the item is done."""

    def __init__(self, plan: Plan, costs: Costs):
        _check_num_costs(costs, plan.num_stages)
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
        self.done: dict[RankItem, float] = {}
        self.waiting: dict[RankItem, list[int]] = {}  # the ranks

    def to_the_end(self) -> None:
        """Run all rows. Raises `PlanError`."""
        ready = list(reversed(range(self.plan.num_ranks)))
        while ready:
            ready += self.advance(ready.pop())
        if any(len(ends) < len(row) for ends, row in zip(self.ends, self.plan.rows, strict=True)):
            raise self.stuck()

    def advance(self, rank: int) -> list[int]:
        """Run the row of a rank until an item is missing; return the ranks that can continue."""
        row, starts, ends = self.plan.rows[rank], self.starts[rank], self.ends[rank]
        done, clock, ready = self.done, self.clock[rank], []
        while len(ends) < len(row):
            action = row[len(ends)]
            start = clock
            for need, delay in self.needs(rank, action):
                if need not in done:
                    self.waiting.setdefault(need, []).append(rank)
                    self.clock[rank] = clock
                    return ready
                start = max(start, done[need] + delay)
            stage, microbatch, word = action.stage, action.microbatch, _WORDS.get(action.op)
            cost = self.cost.get(action.op)
            clock = start if cost is None or stage is None else start + cost[stage]
            starts.append(start)
            ends.append(clock)
            if word is not None:
                key: RankItem = (rank, word, stage, microbatch)  # type: ignore
                done[key] = clock
                ready += self.waiting.pop(key, ())
        self.clock[rank] = clock
        return ready

    def needs(self, rank: int, action: Action) -> Iterator[Wait]:
        """Yield the items that an action waits for, and the delay of each."""
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

    def arrival(self, rank: int, word: str, thing: str, stage: int, other: int, i: int) -> Iterator[Wait]:
        """Yield the items of a neighbouring stage: on this rank directly, else through a message."""
        if other in self.holds[rank]:
            yield (rank, word, other, i), 0.0
        elif not self.lowered:
            yield (self.plan.placement.get(other, -1), word, other, i), self.delay[min(stage, other)]
        else:
            yield (rank, f"RECV_{thing}", stage, i), 0.0
            yield self.sent(f"SEND_{thing}", stage, other, i)

    def sent(self, word: str, stage: int, other: int, i: int) -> Wait:
        """Return the send of a neighbouring stage, and the time of its message."""
        return (self.plan.placement.get(other, -1), word, other, i), self.delay[min(stage, other)]

    def received(self, action: Action, posted: float) -> float:
        """Return when the message of a receive arrives. Raises `PlanError` if it is not sent."""
        stage, i = action.stage, action.microbatch
        assert stage is not None and i is not None
        back = action.op is Op.RECV_GRAD
        other = stage + 1 if back else stage - 1
        if 0 <= other <= self.last:
            need, delay = self.sent("SEND_GRAD" if back else "SEND_ACT", stage, other, i)
            if need in self.done:
                return max(posted, self.done[need] + delay)
        raise PlanError(
            "a receive has no send",
            got=str(action),
            want=f"a {'SEND_GRAD' if back else 'SEND_ACT'} of microbatch {i} by stage {other}",
        )

    def timeline(self) -> Timeline:
        """Return the events and the peaks of memory."""
        rows = []
        for row, starts, ends in zip(self.plan.rows, self.starts, self.ends, strict=True):
            events = []
            for action, start, end in zip(row, starts, ends, strict=True):
                end = self.received(action, end) if action.op in RECVS else end
                events.append(Event(action, start, end))
            rows.append(tuple(events))
        bytes_of = lambda stage: self.costs.at("activation_bytes", stage)
        most = [peaks(row, bytes_of, trains=self.plan.trains) for row in rows]
        return Timeline(tuple(rows), tuple(b for b, _ in most), tuple(n for _, n in most))

    def stuck(self) -> PlanError:
        """Return the error that shows what each rank waits for."""
        actions = ((rank, action) for rank, row in enumerate(self.plan.rows) for action in row)
        all_of = {(_WORDS.get(a.op), a.stage, a.microbatch): (rank, a) for rank, a in actions}
        lines = []
        for rank, (row, ends) in enumerate(zip(self.plan.rows, self.ends, strict=True)):
            if len(ends) == len(row):
                lines.append(f"rank {rank} is at its end")
                continue
            action = row[len(ends)]
            need = next(need for need, _ in self.needs(rank, action) if need not in self.done)
            _, word, stage, i = need
            other, wanted = all_of.get((word, stage, i), (None, f"{stage}{word}{i}"))
            where = "is not in the plan" if other is None else f"is later in the row of rank {other}"
            lines.append(f"rank {rank} is at {action} and waits for {wanted}, which {where}")
        shown = lines if len(lines) <= 16 else [*lines[:16], f"and {len(lines) - 16} more"]
        return PlanError(
            "the plan deadlocks: every rank that is not at its end waits",
            got="\n".join(shown),
            want="each action after its dependencies",
        )
