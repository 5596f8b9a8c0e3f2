"""DualPipeV ("cut in half"): two stages a rank laid out as a V; forwards alternate with backwards of the other stage.

A forward and a BW that follow each other are of different microbatches and stages: an interpreter may run them at the
same time, so that one computes while the other communicates. Here they are two separate actions.

Bubble: (p - 1) tF where tF = tB = tW; published for pairs that run as one, in tFB: (p - 1)(tFB + tB - 2tW)
Live:   2p + 1 (stage, microbatch)s on a rank, each half of 1F1B's
Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1; cut in half by Qi et al. (the README of deepseek-ai/DualPipe)
"""

from __future__ import annotations

from collections import deque

from fds.plans.plan import Plan
from fds.plans.schedules.row import BW, B, F, Row, W
from fds.plans.schedules.sizes import check_sizes


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Plan:
    """Return the plan of stages r and 2p - 1 - r on rank r with pairs of forward and backward. Raises `PlanError`.

    >>> dualpipe_v(1, 2)
    0: 0F0 1F0 0F1 1BW0 1F1 0BW0 1BW1 0B1 0W1
    """
    check_sizes("dualpipe_v", num_ranks, num_microbatches, least=2 * num_ranks if isinstance(num_ranks, int) else 1)
    return Plan.of(_row(rank, num_ranks, num_microbatches) for rank in range(num_ranks))


def _row(rank: int, num_ranks: int, num_microbatches: int):
    down, up = rank, 2 * num_ranks - 1 - rank  # the two stages: on the way to the last rank, and on the way back
    row, below, pending = Row(), num_ranks - rank - 1, deque[int]()

    def backward(stage: int, split: bool) -> None:
        row.do(stage, B if split else BW)
        if split:
            pending.append(stage)

    def weight() -> None:  # of the oldest pending backward
        if pending:
            row.do(pending.popleft(), W)

    row.do(down, *[F] * (2 * below))
    for _ in range(rank + 1):
        row.do(down, F)
        row.do(up, F)
    row.do(up, *[B, W, F] * below)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        row.do(down, F)
        row.do(up, BW)
        row.do(up, F)
        row.do(down, BW)
    for _ in range(below):
        row.do(up, BW, F)
        row.do(down, BW)
    # the last backwards: BW first, then B, whose W fills the wait for the others
    for last in range(2 * (rank + 1)):
        backward(down if last % 2 else up, split=last > rank)
    for _ in range(below):
        weight()
        backward(down, split=True)
    while pending:
        weight()
    return row.actions
