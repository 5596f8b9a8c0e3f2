"""What runs on all ranks: a candidate in earnest."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fds import tree
from fds.collectives import mesh
from fds.profiling.peaks import of_second_call
from fds.state import State
from fds.step import Step
from fds.tuning.problem import Problem
from fds.tuning.spaces import Candidate

BLOCKS = 5  # of calls: their median counts


def run_candidate(tell: Callable[[Any], None], problem: Problem, candidate: Candidate, seconds: float) -> None:
    """Train a few calls on this rank: tell their seconds, then the bytes at the peak of another call."""
    ranks = mesh(**candidate.axes)
    step = problem.step(candidate, ranks)
    state, batch = problem.init(step), problem.share(candidate, ranks)
    everyone = ranks[tuple(candidate.axes)]
    tell(time_calls(step, state, batch, seconds, lambda calls: max(everyone.exchange(calls))))
    del state
    state = problem.init(step)
    if problem.device == "cpu":
        tell(sum(of_second_call(step, state, batch).values()))
    else:
        torch.cuda.reset_peak_memory_stats()
        step(state, batch)
        tell(torch.cuda.max_memory_allocated())


def time_calls(step: Step, state: State, batch: Any, seconds: float, agree: Callable[[int], int]) -> float:
    """Return the seconds of a call: the median of blocks of at least `seconds`, after calls that learn and warm up.

    `agree` makes of the number of calls that this rank would time the one that all of them do.
    """
    metrics: Mapping[str, Tensor] = {}

    def run(calls: int) -> float:
        nonlocal state, metrics
        begin = time.perf_counter()
        for _ in range(calls):
            state, metrics = step(state, batch)
        tree.values_of(metrics["loss"])  # which waits for the device
        return (time.perf_counter() - begin) / calls

    run(2)
    calls = agree(math.ceil(seconds / max(run(1), 1e-6)))
    return statistics.median(run(calls) for _ in range(BLOCKS))
