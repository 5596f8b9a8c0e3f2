"""Lowering: passes that add loads, messages, reductions, the optimizer step and buffers to a plan of computations."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator

from fds.errors import PlanError, is_int
from fds.plans.order import in_ticks
from fds.plans.plan import COMPUTE, RECVS, Action, Op, Plan, Rows


def communicate(plan: Plan | Rows) -> Plan:
    """Return the plan with loads, and with sends and receives between stages on different ranks.

    LOAD comes before a forward of the first stage (inputs) and of the last (targets). SEND_ACT matches RECV_ACT of the
    next stage, SEND_GRAD matches RECV_GRAD of the previous stage, right after B or BW. Between stages of one rank
    nothing is sent: the interpreter passes the tensors on.

    Messages cannot deadlock, even if sends and receives block until the other side is there: all computations and
    messages are put in one order, that of `linear` with the messages of a tick after its computations, and a row is the
    rank's part of that order. So messages of one kind between two ranks have the same order on both sides.
    Raises `PlanError` if ranks wait for each other, and for a plan that is already lowered.

    >>> communicate([["0F0", "0BW0"], ["1F0", "1BW0"]])
    0: 0LOAD0 0F0 0SEND_ACT0 0RECV_GRAD0 0BW0
    1: 1RECV_ACT0 1LOAD0 1F0 1BW0 1SEND_GRAD0
    """
    plan = Plan.of(plan)
    _check_computations(plan)
    rows: list[list[Action]] = [[] for _ in plan.rows]
    for _, tick in itertools.groupby(in_ticks(plan), key=lambda step: step[0]):
        computations = [(rank, action) for _, rank, action in tick]
        for rank, action in computations:
            if action.op is Op.FORWARD and action.stage in (0, plan.num_stages - 1):
                rows[rank].append(Action(action.stage, Op.LOAD, action.microbatch))
            rows[rank].append(action)
        for rank, action in computations:
            for at, message in _message(plan, rank, action):
                rows[at].append(message)
    return Plan.of(rows)


def overlap(plan: Plan | Rows, *, ahead: int = 1) -> Plan:
    """Return the lowered plan with receives posted early: each `ahead` computations before its place.

    Receives of a rank keep their order, and none is posted while its buffer is in use or, if no buffers are assigned,
    before an action of its own microbatch at its stage. Sends stay right behind their computations: the interpreter
    starts them, and waits for them only when it needs their memory. It waits for a receive where the message is used.

    The plan is for interpreters that do so. If receives block, or messages of the two directions wait for each other,
    run the plan of `communicate` unchanged. Raises `PlanError` for a negative `ahead`.

    >>> plan = communicate([["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]])
    >>> plan.rows[1][:8]
    (1RECV_ACT0, 1LOAD0, 1F0, 1RECV_ACT1, 1BW0, 1SEND_GRAD0, 1LOAD1, 1F1)
    >>> overlap(plan).rows[1][:8]
    (1RECV_ACT0, 1LOAD0, 1RECV_ACT1, 1F0, 1BW0, 1SEND_GRAD0, 1LOAD1, 1F1)
    """
    if not is_int(ahead, 0):
        raise PlanError("ahead is not a count", where="overlap", got=f"ahead={ahead!r}", want="ahead >= 0")
    return Plan(tuple(_post_early(row, ahead) for row in Plan.of(plan).rows))


def finish(plan: Plan | Rows, *, tied: Iterable[int] = ()) -> Plan:
    """Return the training plan with gradient reductions and the optimizer step at the end of each row.

    `tied` are the stages that share parameters with another stage: their ranks also reduce the shared gradients.
    Raises `PlanError` for a plan without backwards, for a plan that is finished, and for unknown stages.

    >>> finish([["0F0", "0BW0"], ["1F0", "1BW0"]], tied=[0])
    0: 0F0 0BW0 REDUCE REDUCE_TIED STEP
    1: 1F0 1BW0 REDUCE STEP
    """
    plan, tied = Plan.of(plan), set(tied)
    if not plan.trains:
        raise PlanError(
            "a plan without backwards has no gradients to reduce", where="finish", want="a plan with BW, or B and W"
        )
    if any(action.stage is None for row in plan.rows for action in row):
        raise PlanError("the plan is finished", where="finish", want="a plan without REDUCE, REDUCE_TIED and STEP")
    if unknown := tied - set(plan.placement):
        raise PlanError(
            "unknown stages",
            where="finish(tied=...)",
            got=f"{sorted(unknown)}",
            want=f"stages of 0 to {plan.num_stages - 1}",
        )
    owners = {plan.placement[stage] for stage in tied}
    reduce, reduce_tied, step = (Action(None, op) for op in (Op.REDUCE_GRADS, Op.REDUCE_TIED_GRADS, Op.OPTIMIZER_STEP))
    end = lambda rank: (reduce, reduce_tied, step) if rank in owners else (reduce, step)
    return Plan(tuple((*row, *end(rank)) for rank, row in enumerate(plan.rows)))


def _check_computations(plan: Plan) -> None:
    for rank, row in enumerate(plan.rows):
        for place, action in enumerate(row):
            if action.op not in COMPUTE or action.buffer is not None:
                raise PlanError(
                    "only a plan of computations can be lowered",
                    got=str(action),
                    where=f"rank {rank}, action {place}: {action}",
                    want="F, B, W and BW, without buffers",
                    hint="first communicate, then overlap, assign_buffers and finish",
                )


def _message(plan: Plan, rank: int, action: Action) -> Iterator[tuple[int, Action]]:
    """Yield the send and the receive of a computation's result, each with its rank, if another rank needs it."""
    if action.op is Op.FORWARD:
        other, send, receive = action.stage + 1, Op.SEND_ACTIVATION, Op.RECV_ACTIVATION  # type: ignore[operator]
    elif action.op is Op.BACKWARD_WEIGHT:
        return
    else:
        other, send, receive = action.stage - 1, Op.SEND_GRAD, Op.RECV_GRAD  # type: ignore[operator]
    if plan.placement.get(other, rank) != rank:
        yield rank, Action(action.stage, send, action.microbatch)
        yield plan.placement[other], Action(other, receive, action.microbatch)


def _post_early(row: tuple[Action, ...], ahead: int) -> tuple[Action, ...]:
    out: list[Action] = []
    for action in row:
        place = _earliest(out, action, ahead) if action.op in RECVS else len(out)
        out.insert(place, action)
    return tuple(out)


def _earliest(before: list[Action], receive: Action, ahead: int) -> int:
    """Return the index in the row so far at which a receive is posted."""
    place = len(before)
    for at in range(len(before) - 1, -1, -1):
        action = before[at]
        if ahead == 0 or action.op in RECVS or _holds_its_buffer(action, receive):
            break
        if action.op in COMPUTE:
            place, ahead = at, ahead - 1
    return place


def _holds_its_buffer(action: Action, receive: Action) -> bool:
    key = lambda a: a.microbatch if receive.buffer is None else a.buffer
    return action.stage == receive.stage and key(action) == key(receive)


Key = tuple[int, int]  # (stage, microbatch)


def assign_buffers(plan: Plan | Rows) -> Plan:
    """Return the plan with the buffer that each action uses, counted from 0 at each stage.

    A microbatch holds a buffer of a stage from its first action there (of RECV_ACT, LOAD and F) to its last (of
    SEND_GRAD, BW and W). Each takes the lowest free one, so a stage has as many buffers as microbatches are live at
    once. Buffers that were assigned before are replaced.

    >>> assign_buffers([["0F0", "0F1", "0BW0", "0F2", "0BW1", "0BW2"]])
    0: 0F0@0 0F1@1 0BW0@0 0F2@0 0BW1@1 0BW2@0
    """
    return Plan(tuple(_assigned(row) for row in Plan.of(plan).rows))


def num_buffers(plan: Plan | Rows) -> dict[int, int]:
    """Return the number of buffers of each stage, assigning them first if the plan has none.

    >>> num_buffers([["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]])
    {0: 2, 1: 1}
    """
    plan = Plan.of(plan)
    if all(action.buffer is None for row in plan.rows for action in row):
        plan = assign_buffers(plan)
    most = dict.fromkeys(sorted(plan.placement), 0)
    for row in plan.rows:
        for action in row:
            if action.stage is not None and action.buffer is not None:
                most[action.stage] = max(most[action.stage], action.buffer + 1)
    return most


def last_uses(row: tuple[Action, ...]) -> dict[Key, int]:
    """Return the index in a row of the last action of every (stage, microbatch)."""
    return {key: place for place, key in _keys(row)}


def _keys(row: tuple[Action, ...]) -> Iterator[tuple[int, Key]]:
    for place, action in enumerate(row):
        if action.stage is not None and action.microbatch is not None:
            yield place, (action.stage, action.microbatch)


def _assigned(row: tuple[Action, ...]) -> tuple[Action, ...]:
    actions, last = list(row), last_uses(row)
    free: dict[int, list[int]] = {}  # stage -> buffers that are free again
    count: dict[int, int] = {}  # stage -> number of buffers
    buffers: dict[Key, int] = {}
    for place, key in _keys(row):
        stage, microbatch = key
        if key not in buffers:
            available = free.setdefault(stage, [])
            buffers[key] = heapq.heappop(available) if available else count.get(stage, 0)
            count[stage] = max(count.get(stage, 0), buffers[key] + 1)
        actions[place] = Action(stage, row[place].op, microbatch, buffers[key])
        if last[key] == place:
            heapq.heappush(free[stage], buffers[key])
    return tuple(actions)
