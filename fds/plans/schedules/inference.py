"""Inference: forwards only.

Bubble: (p - 1) tF
Live:   one microbatch on every rank
Source: none: a chain of ranks
"""

from __future__ import annotations

from collections.abc import Mapping

from fds.plans.actions import Action
from fds.plans.plan import Plan
from fds.plans.schedules.row import F, Row
from fds.plans.schedules.sizes import check_sizes


def inference(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan of all forwards and no backward. Raises `PlanError`.

    >>> inference(2, 3)
    0: 0F0 0F1 0F2
    1: 1F0 1F1 1F2
    """
    check_sizes("inference", num_ranks, num_microbatches)
    rows = [Row() for _ in range(num_ranks)]
    for rank, row in enumerate(rows):
        row.do(rank, *[F] * num_microbatches)
    return Plan.of(row.actions for row in rows)


def forwards_of(placement: Mapping[int, int], num_microbatches: int) -> Plan:
    """Return the plan of all forwards for stages placed on these ranks (stage -> rank).

    Every rank does them in the order of microbatch + stage, so that none waits for a later one.

    >>> forwards_of({0: 0, 1: 1, 2: 1, 3: 0}, 2)
    0: 0F0 0F1 3F0 3F1
    1: 1F0 1F1 2F0 2F1
    """
    rows: list[list[Action]] = [[] for _ in range(max(placement.values()) + 1)]
    stages = range(len(placement))
    for _, stage, i in sorted((i + stage, stage, i) for stage in stages for i in range(num_microbatches)):
        rows[placement[stage]].append(Action(stage, F, i))
    return Plan.of(rows)
