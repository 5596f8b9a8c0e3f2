"""Interleaved 1F1B: a rank holds several chunks of the model, so that ranks wait for one chunk only.

Bubble: (p - 1)(tF + tB + tW), times being those of a stage: with v chunks a v-th of 1F1B's
Live:   min(vm, (v - 1)p + 2(p - r - 1) + 1) (stage, microbatch)s on rank r, each a v-th of 1F1B's; v > 1
Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2
"""

from __future__ import annotations

import attrs

from fds.errors import PlanError
from fds.plans.plan import Plan
from fds.plans.schedules.row import BW, F, Row
from fds.plans.schedules.sizes import check_count, check_sizes


@attrs.frozen(repr=False)
class Interleaved:
    """The schedule of this many chunks a rank: stage chunk * p + r on rank r."""

    chunks: int

    def __call__(self, num_ranks: int, num_microbatches: int) -> Plan:
        check_sizes(repr(self), num_ranks, num_microbatches)
        if num_microbatches % num_ranks:
            raise PlanError(
                "the number of microbatches is not a multiple of the number of ranks",
                where=repr(self),
                got=f"num_ranks={num_ranks}, num_microbatches={num_microbatches}",
                want=f"a multiple of {num_ranks} microbatches",
            )
        return Plan.of(self._row(rank, num_ranks, num_microbatches).actions for rank in range(num_ranks))

    def _row(self, rank: int, num_ranks: int, num_microbatches: int) -> Row:
        row, total = Row(), self.chunks * num_microbatches
        per_rank_behind = 2 if self.chunks > 1 else 1  # with one chunk as in 1F1B
        warm_up = min(total, (self.chunks - 1) * num_ranks + per_rank_behind * (num_ranks - rank - 1))
        chunk = lambda turn: turn // num_ranks % self.chunks  # a round takes p microbatches through a chunk
        for turn in range(total + warm_up):
            if turn < total:
                row.do(chunk(turn) * num_ranks + rank, F)
            if turn >= warm_up:
                row.do((self.chunks - 1 - chunk(turn - warm_up)) * num_ranks + rank, BW)
        return row

    def __repr__(self) -> str:
        return f"interleaved({self.chunks})"


def interleaved(chunks: int) -> Interleaved:
    """Return the schedule of 1F1B over `chunks` stages a rank. Raises `PlanError`.

    The number of microbatches must be a multiple of p. With one chunk it is 1F1B.

    >>> interleaved(2)(2, 2)
    0: 0F0 0F1 2F0 2F1 2BW0 2BW1 0BW0 0BW1
    1: 1F0 1F1 3F0 3BW0 3F1 3BW1 1BW0 1BW1
    """
    check_count("interleaved", "chunks", chunks)
    return Interleaved(chunks)
