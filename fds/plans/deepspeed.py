"""DeepSpeed's instruction streams: a plan in ticks, with DeepSpeed's names, buffers and order of messages.

Source: `deepspeed.runtime.pipe.schedule`, as documented (0.3.0 to 0.8.2) and as it is since (to 0.19.6).
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from fds.errors import PlanError, nearest
from fds.plans.plan import COMPUTE, Action, Op, Plan

Tick = tuple[Action, ...]
_WORDS = {
    Op.LOAD: "LoadMicroBatch",
    Op.FORWARD: "ForwardPass",
    Op.BACKWARD: "BackwardPass",
    Op.SEND_ACTIVATION: "SendActivation",
    Op.RECV_ACTIVATION: "RecvActivation",
    Op.SEND_GRAD: "SendGrad",
    Op.RECV_GRAD: "RecvGrad",
    Op.REDUCE_TIED_GRADS: "ReduceTiedGrads",
    Op.REDUCE_GRADS: "ReduceGrads",
    Op.OPTIMIZER_STEP: "OptimizerStep",
}
_SEND = {Op.FORWARD: Op.SEND_ACTIVATION, Op.BACKWARD: Op.SEND_GRAD}
_RECV = {Op.FORWARD: Op.RECV_ACTIVATION, Op.BACKWARD: Op.RECV_GRAD}


@attrs.frozen
class Rules:
    """How a schedule class of one edition of DeepSpeed puts a plan into ticks."""

    turns: bool = False  # forward ticks of stage s have the parity of s, backward ticks the other one
    whole_microbatches: bool = False  # the forward and the backward of a microbatch share a tick
    sends_first: frozenset[tuple[Op, int]] = frozenset()  # (what is computed, parity of the stage); else receives first
    loads_first: bool = False  # loads stand before the exchange, else after it
    least_buffers: int = 1
    spare_buffers: int = 0  # beyond the most microbatches that a stage holds at once
    last: tuple[Op, ...] = ()  # what the last tick ends with


_TRAIN = Rules(turns=True, least_buffers=2, last=(Op.REDUCE_TIED_GRADS, Op.REDUCE_GRADS, Op.OPTIMIZER_STEP))
_SAME = {
    "InferenceSchedule": Rules(sends_first=frozenset({(Op.FORWARD, 0)}), loads_first=True, least_buffers=2),
    "DataParallelSchedule": Rules(whole_microbatches=True, last=(Op.REDUCE_GRADS, Op.OPTIMIZER_STEP)),
}


def _train(sends_first: Op, spare_buffers: int) -> Rules:
    both = frozenset({(sends_first, 0), (sends_first, 1)})
    return attrs.evolve(_TRAIN, sends_first=both, spare_buffers=spare_buffers)


EDITIONS: Mapping[str, Mapping[str, Rules]] = {  # each from the version named on
    "0.3.0": {"TrainSchedule": _train(sends_first=Op.BACKWARD, spare_buffers=1), **_SAME},
    "0.19.6": {"TrainSchedule": _train(sends_first=Op.FORWARD, spare_buffers=0), **_SAME},
}


def in_ticks(plan: Plan, *, edition: str = "0.19.6", schedule: str | None = None) -> tuple[tuple[Tick, ...], ...]:
    """Return the actions of every rank in every tick, as a schedule class of DeepSpeed yields them per stage.

    Each action runs in the earliest tick after its dependencies. A tick sends the results of the previous tick and
    receives its own inputs, then computes. Messages that the plan already contains are replaced.

    Args:
        plan: one stage per rank, in order: of `one_f_one_b`, `inference`, `data_parallel`, or your own.
        edition: a key of `EDITIONS`.
        schedule: the class, by default `"TrainSchedule"` if the plan has backwards, else `"InferenceSchedule"`; for a
            plan of one stage also `"DataParallelSchedule"`.

    Raises `PlanError` for another edition or class, for a plan that DeepSpeed cannot express, and for a deadlock.

    >>> plan = Plan.of([["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]])
    >>> [words(action) for action in in_ticks(plan)[0][3]]
    ['RecvGrad(buffer_id=0)', 'SendActivation(buffer_id=1)', 'BackwardPass(buffer_id=0)']
    """
    rules = _rules(plan, edition, schedule)
    when = _when(plan, rules)
    num_ticks = 1 + max(when.values(), default=-1)
    counts = _buffers(plan, rules)
    return tuple(_stream(plan, rules, stage, when, num_ticks, count) for stage, count in enumerate(counts))


def num_buffers(plan: Plan, *, edition: str = "0.19.6", schedule: str | None = None) -> tuple[int, ...]:
    """Return the number of buffers of each rank, as `num_pipe_buffers` does; microbatch m is in buffer m % number.

    Raises `PlanError` as `in_ticks` does.
    """
    return _buffers(plan, _rules(plan, edition, schedule))


def words(action: Action) -> str:
    """Return an action as DeepSpeed prints it. Raises `PlanError` for B and W, which it does not have.

    >>> words(Action.parse("1SEND_GRAD3@0")), words(Action.parse("REDUCE_TIED"))
    ('SendGrad(buffer_id=0)', 'ReduceTiedGrads()')
    """
    if action.op not in _WORDS:
        raise PlanError("DeepSpeed has no such instruction", got=str(action), want=" ".join(op.value for op in _WORDS))
    return f"{_WORDS[action.op]}({'' if action.buffer is None else f'buffer_id={action.buffer}'})"


def _rules(plan: Plan, edition: str, schedule: str | None) -> Rules:
    if edition not in EDITIONS:
        raise PlanError("unknown edition", where="edition", got=repr(edition), want=" or ".join(EDITIONS))
    if schedule is None:
        schedule = "TrainSchedule" if plan.trains else "InferenceSchedule"
    if schedule not in EDITIONS[edition]:
        raise PlanError(
            "unknown schedule",
            where="schedule",
            got=repr(schedule),
            want=", ".join(EDITIONS[edition]),
            hint=nearest(schedule, EDITIONS[edition]),
        )
    if plan.trains == (schedule == "InferenceSchedule") or (schedule == "DataParallelSchedule" and plan.num_ranks > 1):
        raise PlanError(
            "the plan does not fit this schedule",
            where=schedule,
            got=f"{plan.num_ranks} stages, {'with' if plan.trains else 'without'} backwards",
            want="backwards, but for InferenceSchedule; one stage for DataParallelSchedule",
        )
    compute = [a for row in plan.rows for a in row if a.op in COMPUTE]
    if any(a.op not in _WORDS for a in compute):
        raise PlanError("DeepSpeed has no split backward", got="B and W", want="F and BW only")
    if any(a.stage != rank for rank, row in enumerate(plan.rows) for a in row if a.op in COMPUTE):
        raise PlanError(
            "DeepSpeed's ranks hold one stage each",
            want="stage i on rank i only",
            got=f"{plan.num_stages} stages on {plan.num_ranks} ranks",
        )
    if len(set(compute)) < len(compute):
        raise PlanError(
            "an action is in the plan twice",
            got=str(next(a for a in compute if compute.count(a) > 1)),
            want="every action once",
        )
    return EDITIONS[edition][schedule]


def _computes(action: Action) -> bool:
    return action.op in COMPUTE


def _source(plan: Plan, action: Action) -> Action | None:
    """Return the action of another stage whose output is the input of this one."""
    at = action.stage + (-1 if action.op is Op.FORWARD else 1)  # type: ignore[operator]
    return Action(at, action.op, action.microbatch) if 0 <= at < plan.num_stages else None


def _is_sent(plan: Plan, action: Action) -> bool:
    """Return whether the output of this action is sent to another stage."""
    return action.stage != (plan.num_stages - 1 if action.op is Op.FORWARD else 0)


def _when(plan: Plan, rules: Rules) -> dict[Action, int]:
    """Return the tick of every action: the earliest after its dependencies that its parity allows."""
    rows = [[attrs.evolve(a, buffer=None) for a in filter(_computes, row)] for row in plan.rows]
    when: dict[Action, int] = {}
    done = [0] * len(rows)
    while any(done[rank] < len(row) for rank, row in enumerate(rows)):
        before = sum(done)
        for rank, row in enumerate(rows):
            while done[rank] < len(row):
                action, last = row[done[rank]], row[done[rank] - 1] if done[rank] else None
                source = _source(plan, action)
                if source is not None and source not in when:
                    break
                when[action] = _earliest(rules, action, when, last, source)
                done[rank] += 1
        if sum(done) == before:
            stuck = {rank: row[done[rank]] for rank, row in enumerate(rows) if done[rank] < len(row)}
            raise PlanError(
                "the plan deadlocks",
                where=", ".join(f"rank {r} at {a}" for r, a in stuck.items()),
                want="an order in which every action follows its dependencies",
            )
    return when


def _earliest(rules: Rules, action: Action, when: dict[Action, int], last: Action | None, source: Action | None) -> int:
    tick = 0 if source is None else when[source] + 1
    if last is not None:
        together = rules.whole_microbatches and last.microbatch == action.microbatch
        tick = max(tick, when[last] + (not together))
    backward = action.op is Op.BACKWARD
    return tick + (rules.turns and (tick + action.stage + backward) % 2)  # type: ignore[operator]


def _buffers(plan: Plan, rules: Rules) -> tuple[int, ...]:
    counts = []
    for row in plan.rows:
        live = most = 0
        for action in filter(_computes, row):
            live += 1 if action.op is Op.FORWARD else -1
            most = max(most, live)
        needed = most if plan.trains else 1  # without a backward nothing is saved
        counts.append(max(rules.least_buffers, min(needed + rules.spare_buffers, plan.num_microbatches)))
    return tuple(counts)


def _stream(
    plan: Plan, rules: Rules, stage: int, when: dict[Action, int], num_ticks: int, num_buffers: int
) -> tuple[Tick, ...]:
    computed: list[list[Action]] = [[] for _ in range(num_ticks)]
    for action in filter(_computes, plan.rows[stage]):
        buffer = action.microbatch % num_buffers  # type: ignore[operator]
        computed[when[attrs.evolve(action, buffer=None)]].append(attrs.evolve(action, buffer=buffer))
    ticks = [_tick(plan, rules, stage, *pair) for pair in zip(computed, [[], *computed], strict=False)]
    return (*ticks[:-1], (*ticks[-1], *(Action(None, op) for op in rules.last))) if ticks else ()


def _tick(plan: Plan, rules: Rules, stage: int, now: list[Action], before: list[Action]) -> Tick:
    """Return the actions of `stage` in the tick that computes `now`, after the tick that computed `before`."""
    loads = [attrs.evolve(a, op=Op.LOAD) for a in now if a.op is Op.FORWARD and stage in (0, plan.num_stages - 1)]
    recvs = [attrs.evolve(a, op=_RECV[a.op]) for a in now if _source(plan, a) is not None]
    sends = [attrs.evolve(a, op=_SEND[a.op]) for a in before if _is_sent(plan, a)]
    exchange = sends + recvs if now and (now[0].op, stage % 2) in rules.sends_first else recvs + sends
    return tuple([*loads, *exchange, *now] if rules.loads_first else [*exchange, *loads, *now])
