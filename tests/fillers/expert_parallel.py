"""Expert parallelism: each rank of an axis has some of the experts, and rows travel to the rank of their expert."""

from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fds.collectives import Axis, all_to_all
from fds.step import Dimension, Placement, Replicated, SplitDim, fill, transform


class Experts(Placement):
    """Parameters of experts are split along dim 0, one row an expert; gradients of all others are summed."""

    def __init__(self, axis, patterns):
        self.axis, self.patterns = axis, patterns

    def lies(self, name):
        return SplitDim(0) if any(fnmatchcase(name, p) for p in self.patterns) else Replicated("sum")


@transform
def expert_parallel(axis: Axis, *patterns: str):
    """Divide the parameters that a pattern matches over ranks that pass other rows (Lepikhin et al. 2020)."""
    channel = axis.channel("expert_parallel")
    return lambda step: fill(step, topology=Dimension(channel, "data", Experts(channel, patterns)))


def by_experts(run: Callable[[int, Tensor], Tensor], x: Tensor, expert: Tensor, here: int, axis: Axis) -> Tensor:
    """Return `run(i, rows)` of every row of `x` (rows, width), i being its expert's number on the rank that has it.

    `expert` (rows,) has the number of each row's expert among all, of which each rank has `here`.
    """
    rank, row = expert // here, torch.arange(len(x), device=x.device)
    sent = x.new_zeros(axis.size, *x.shape).index_put((rank, row), x)  # room for every row on every rank
    number = expert.new_full((axis.size, len(x)), -1).index_put((rank, row), expert % here)
    got, number = all_to_all(sent, axis), all_to_all(number, axis)
    out = sum((number == i)[..., None] * run(i, got) for i in range(here))
    return all_to_all(out, axis)[rank, row]
