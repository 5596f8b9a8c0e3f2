"""Buffers: which of a stage's buffers a microbatch has while it is under way, as few of them as can be."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from fds.plans.actions import Action
from fds.plans.plan import Plan, Rows

Held = tuple[int, int]  # (stage, microbatch)


def assign_buffers(plan: Plan | Rows) -> Plan:
    """Return the plan whose actions say which buffer of their stage they use, counted from 0.

    A microbatch has its buffer at a stage from its first action there (of RECV_ACT, LOAD and F) to its last (of
    SEND_GRAD, BW and W). The next takes the lowest that is free, so that a stage has as many as it has microbatches
    under way at once. Numbers that were there are replaced.

    >>> assign_buffers([["0F0", "0F1", "0BW0", "0F2", "0BW1", "0BW2"]])
    0: 0F0@0 0F1@1 0BW0@0 0F2@0 0BW1@1 0BW2@0
    """
    return Plan(tuple(_assigned(row) for row in Plan.of(plan).rows))


def num_buffers(plan: Plan | Rows) -> dict[int, int]:
    """Return how many buffers each stage has: those that were assigned, or those that would be.

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


def last_uses(row: tuple[Action, ...]) -> dict[Held, int]:
    """Return the place in a row of the last action of every (stage, microbatch)."""
    return {held: place for place, held in _holders(row)}


def _holders(row: tuple[Action, ...]) -> Iterator[tuple[int, Held]]:
    for place, action in enumerate(row):
        if action.stage is not None and action.microbatch is not None:
            yield place, (action.stage, action.microbatch)


def _assigned(row: tuple[Action, ...]) -> tuple[Action, ...]:
    actions, last = list(row), last_uses(row)
    free: dict[int, list[int]] = {}  # of a stage, the numbers given back
    count: dict[int, int] = {}  # of a stage, the numbers made
    buffers: dict[Held, int] = {}
    for place, held in _holders(row):
        stage, microbatch = held
        if held not in buffers:
            given_back = free.setdefault(stage, [])
            buffers[held] = heapq.heappop(given_back) if given_back else count.get(stage, 0)
            count[stage] = max(count.get(stage, 0), buffers[held] + 1)
        actions[place] = Action(stage, row[place].op, microbatch, buffers[held])
        if last[held] == place:
            heapq.heappush(free[stage], buffers[held])
    return tuple(actions)
