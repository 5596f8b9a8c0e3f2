"""Data parallel: one stage with gradient accumulation.

Bubble: none
Live:   one microbatch
Source: none: gradient accumulation, written as a plan
"""

from __future__ import annotations

from fds.errors import PlanError
from fds.plans.plan import Plan
from fds.plans.schedules.row import BW, F, Row
from fds.plans.schedules.sizes import check_sizes


def data_parallel(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan of one stage: a forward and its backward, microbatch by microbatch. Raises `PlanError`.

    >>> data_parallel(1, 3)
    0: 0F0 0BW0 0F1 0BW1 0F2 0BW2
    """
    check_sizes("data_parallel", num_ranks, num_microbatches)
    if num_ranks != 1:
        raise PlanError(
            "data parallelism has one stage",
            where="data_parallel",
            got=f"num_ranks={num_ranks}",
            want="num_ranks=1",
            hint="a schedule of several stages: one_f_one_b",
        )
    row = Row()
    row.do(0, *[F, BW] * num_microbatches)
    return Plan.of([row.actions])
