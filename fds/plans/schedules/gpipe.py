"""GPipe: all forwards, then all backwards.

Bubble: (p - 1)(tF + tB + tW): (p - 1) / (m + p - 1) of the whole
Live:   m microbatches on every rank
Source: Huang et al. 2019, arXiv:1811.06965, section 2.3
"""

from __future__ import annotations

from fds.plans.plan import Plan
from fds.plans.schedules.row import BW, F, Row
from fds.plans.schedules.sizes import check_sizes


def gpipe(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan of all forwards, then all backwards. Raises `PlanError`.

    >>> gpipe(2, 3)
    0: 0F0 0F1 0F2 0BW0 0BW1 0BW2
    1: 1F0 1F1 1F2 1BW0 1BW1 1BW2
    """
    check_sizes("gpipe", num_ranks, num_microbatches)
    rows = [Row() for _ in range(num_ranks)]
    for rank, row in enumerate(rows):
        row.do(rank, *[F] * num_microbatches, *[BW] * num_microbatches)
    return Plan.of(row.actions for row in rows)
