"""ZB-H1: 1F1B with weight gradients delayed to the end, where 1F1B is idle.

Bubble: (p - 1)(tF + tB - tW), a third of 1F1B's where the three are equal and m >= p
Live:   min(m, p) microbatches on every rank, which 1F1B has on its first; up to their B min(m, p - r), as 1F1B
Source: Qi et al. 2023, arXiv:2401.10241, section 2.1
"""

from __future__ import annotations

from fds.plans.plan import Plan
from fds.plans.schedules.late_weights import late_weights
from fds.plans.schedules.sizes import check_sizes


def zb_h1(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan of 1F1B with W r microbatches behind B on rank r. Raises `PlanError`.

    >>> zb_h1(2, 3)
    0: 0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2
    1: 1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2
    """
    check_sizes("zb_h1", num_ranks, num_microbatches)
    row = lambda r: late_weights(r, num_microbatches, ahead=num_ranks - r - 1, behind=r)
    return Plan.of(row(rank).actions for rank in range(num_ranks))
