"""Assign the buffers of a stage to its live microbatches, using as few buffers as possible."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from fds.plans.actions import Action
from fds.plans.plan import Plan, Rows

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
