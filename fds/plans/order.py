"""Put all actions of a plan in one order that respects their dependencies."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

import attrs

from fds.errors import PlanError
from fds.plans.actions import COMPUTE, RECVS, Action, Op
from fds.plans.dependencies import Item, Needs, gives, needs, rendezvous
from fds.plans.grid import grid
from fds.plans.plan import Plan


@attrs.frozen
class Walk:
    """How far a plan gets when every rank does its row in order, each action once its dependencies are done."""

    steps: tuple[tuple[int, int, Action], ...]  # (tick, rank, action), in order
    places: tuple[int, ...]  # number of actions that each rank has done


def linear(plan: Plan) -> tuple[tuple[int, Action], ...]:
    """Return (rank, action) of a whole plan, in an order that keeps every row and respects all dependencies.

    Actions are ordered by time, if every computation takes one tick and the rest none, and by rank within a tick: one
    process can run them in this order. Raises `PlanError` if ranks wait for each other.

    A receive comes after its send. If that is not possible for the whole plan, as after `overlap`, a receive may come
    before its send, and the use of the message comes after the send.

    >>> linear(Plan.of([["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]]))
    ((0, 0F0), (0, 0F1), (1, 1F0), (1, 1BW0), (0, 0BW0), (1, 1F1), (1, 1BW1), (0, 0BW1))
    """
    return tuple((rank, action) for _, rank, action in in_ticks(plan))


def in_ticks(plan: Plan) -> tuple[tuple[int, int, Action], ...]:
    """Return (tick, rank, action) of a whole plan, in the order of `linear`. Raises `PlanError`."""
    need = lambda action: needs(action, plan.num_stages)
    if any(action.op in RECVS for row in plan.rows for action in row):
        done = walk(plan, need)
        if len(done.steps) == sum(map(len, plan.rows)):
            return done.steps
        need = rendezvous(plan)
    return finish_walk(plan, need, "ranks wait for each other").steps


def finish_walk(plan: Plan, need: Needs, what: str) -> Walk:
    """Walk a plan to its end. Raises `PlanError` with the cycle if ranks wait for each other."""
    done = walk(plan, need)
    for rank, row in enumerate(plan.rows):
        if done.places[rank] < len(row):
            raise _cycle_error(plan, done.places, need, what, rank)
    return done


def walk(plan: Plan, need: Needs, *, timed: Collection[Op] = COMPUTE) -> Walk:
    """Walk a plan as far as possible; the operations in `timed` take one tick, the others none."""
    steps: list[tuple[int, int, Action]] = []
    places = [0] * plan.num_ranks
    since: dict[Item, int] = {}  # the tick from which an item is available
    waiting: dict[Item, list[int]] = {}  # the ranks that wait for an item
    queue = [(0, rank) for rank in range(plan.num_ranks)]  # (tick, rank): when to try a rank again
    while queue:
        tick, rank = heapq.heappop(queue)
        row = plan.rows[rank]
        while places[rank] < len(row):
            action = row[places[rank]]
            missing = [item for item in need(action) if since.get(item, tick + 1) > tick]
            if missing:
                when = since.get(missing[0])
                if when is None:
                    waiting.setdefault(missing[0], []).append(rank)
                else:
                    heapq.heappush(queue, (when, rank))
                break
            steps.append((tick, rank, action))
            places[rank] += 1
            end = tick + (action.op in timed)
            item = gives(action)
            if item is not None:
                since.setdefault(item, end)
                for other in waiting.pop(item, ()):
                    heapq.heappush(queue, (end, other))
            if end > tick:
                heapq.heappush(queue, (end, rank))
                break
    return Walk(tuple(steps), tuple(places))


def blame(what: str, plan: Plan, rank: int, place: int, *, want: str, need: Needs | None = None) -> PlanError:
    """Return an error about the action at index `place` of a rank's row, marked in the ranks x time grid."""
    columns: list[list[int]] = [[] for _ in plan.rows]
    each_takes_time = walk(plan, need or (lambda action: needs(action, plan.num_stages)), timed=set(Op))
    for tick, r, _ in each_takes_time.steps:
        columns[r].append(tick)
    for row, column in zip(plan.rows, columns, strict=True):  # actions that were not reached follow without gaps
        start = column[-1] + 1 if column else 0
        column.extend(range(start, start + len(row) - len(column)))
    where = f"rank {rank}, action {place}: {plan.rows[rank][place]}"
    return PlanError(what, where=where, got=grid(plan, columns, rank, place), want=want)


def _cycle_error(plan: Plan, places: Sequence[int], need: Needs, what: str, rank: int) -> PlanError:
    """Return the error that shows the cycle of waiting ranks reached from `rank`, or an item that no rank produces."""
    position = {gives(a): (r, p) for r, row in enumerate(plan.rows) for p, a in reversed(list(enumerate(row)))}
    waits: dict[int, str] = {}
    while rank not in waits:
        head = plan.rows[rank][places[rank]]
        unmet = [(item, position.get(item)) for item in need(head)]
        item, at = next((item, at) for item, at in unmet if at is None or at[1] >= places[at[0]])
        name = f"{item[1]}{item[0].value}{item[2]}"
        if at is None:
            return blame(what, plan, rank, places[rank], want=f"{name}, which {head} needs", need=need)
        waits[rank] = f"{head} on rank {rank} needs {name}"
        rank = at[0]
    cycle = list(waits)[list(waits).index(rank) :]
    want = ",\n".join([*(waits[r] for r in cycle[:8]), *["..."] * (len(cycle) > 8)])
    return blame(what, plan, rank, places[rank], want=want, need=need)
