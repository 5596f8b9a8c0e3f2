"""ZB-H2: forwards instead of the first wait, weight gradients instead of the last: no bubble, for twice the memory.

Bubble: none where tF = tB = tW and m >= 2p - 1, counted on a rank from its own first start to its own last end
Live:   min(m, 2p - 1) microbatches on every rank; up to their B min(m, 2(p - r) - 1) on rank r
Source: Qi et al. 2023, arXiv:2401.10241, section 2.2
"""

from __future__ import annotations

from fds.plans.plan import Plan
from fds.plans.schedules.late_weights import late_weights
from fds.plans.schedules.sizes import check_sizes


def zb_h2(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan with 2(p - r) - 1 forwards before the first backward on rank r. Raises `PlanError`.

    >>> zb_h2(2, 3)
    0: 0F0 0F1 0F2 0B0 0W0 0B1 0W1 0B2 0W2
    1: 1F0 1B0 1F1 1B1 1F2 1B2 1W0 1W1 1W2
    """
    check_sizes("zb_h2", num_ranks, num_microbatches)
    row = lambda r: late_weights(r, num_microbatches, ahead=2 * (num_ranks - r - 1), behind=2 * r)
    return Plan.of(row(rank).actions for rank in range(num_ranks))
