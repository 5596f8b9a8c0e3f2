"""1F1B (PipeDream-flush): one forward, one backward, so that the memory of a microbatch is freed early.

Bubble: (p - 1)(tF + tB + tW), as GPipe
Live:   min(m, p - r) microbatches on rank r
Source: Narayanan et al. 2021, arXiv:2006.09503, section 3.2; arXiv:2104.04473, section 2.2.1
"""

from __future__ import annotations

from fds.plans.plan import Plan
from fds.plans.schedules.row import BW, F, Row
from fds.plans.schedules.sizes import check_sizes


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan in which a forward and a backward alternate after a warm-up. Raises `PlanError`.

    >>> one_f_one_b(2, 3)
    0: 0F0 0F1 0BW0 0F2 0BW1 0BW2
    1: 1F0 1BW0 1F1 1BW1 1F2 1BW2
    """
    check_sizes("one_f_one_b", num_ranks, num_microbatches)
    rows = [Row() for _ in range(num_ranks)]
    for rank, row in enumerate(rows):
        warm_up = min(num_microbatches, num_ranks - rank - 1)
        row.do(rank, *[F] * warm_up, *[F, BW] * (num_microbatches - warm_up), *[BW] * warm_up)
    return Plan.of(row.actions for row in rows)
