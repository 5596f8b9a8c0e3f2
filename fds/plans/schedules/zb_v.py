"""ZB-V: two stages a rank, laid out as a V, so that the first backward begins on the rank of the last forward.

Bubble: none where tF = tB = tW and m >= 2p - 1, counted on a rank from its own first start to its own last end
Live:   2p (stage, microbatch)s on a rank, or fewer, each half of 1F1B's: what 1F1B has on its first rank
Source: Qi et al. 2024, arXiv:2405.15362; 2023, arXiv:2401.10241, section 6
"""

from __future__ import annotations

from fds.plans.plan import Plan
from fds.plans.schedules.row import B, F, Row, W
from fds.plans.schedules.sizes import check_sizes


def zb_v(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan of stages r and 2p - 1 - r on rank r, one F, B and W of each in turn. Raises `PlanError`.

    >>> zb_v(1, 2)
    0: 0F0 1F0 1B0 1W0 0F1 0B0 0W0 1F1 1B1 1W1 0B1 0W1
    """
    check_sizes("zb_v", num_ranks, num_microbatches)
    full = max(num_microbatches, 2 * num_ranks - 1)  # enough to fill the V; the excess is dropped below
    rows = (_row(rank, num_ranks, full).actions for rank in range(num_ranks))
    return Plan.of([a for a in row if a.microbatch < num_microbatches] for row in rows)  # type: ignore[operator]


def _row(rank: int, num_ranks: int, num_microbatches: int) -> Row:
    down, up = rank, 2 * num_ranks - 1 - rank  # the two stages: on the way to the last rank, and on the way back
    row, below = Row(), num_ranks - rank
    row.do(down, *[F] * (2 * below - 1))
    for _ in range(rank):
        row.do(up, F)
        row.do(down, F)
    row.do(up, *[F, B, W] * below)
    while row.done(up, F) < num_microbatches:
        row.do(down, *[F, B, W] if row.done(down, F) < num_microbatches else [B, W])
        row.do(up, F, B, W)
    for _ in range(rank):
        row.do(down, B)
        row.do(up, B)
    row.do(down, *[B, W] * below)
    row.do(up, *[W] * (num_microbatches - row.done(up, W)))
    row.do(down, *[W] * (num_microbatches - row.done(down, W)))
    return row
