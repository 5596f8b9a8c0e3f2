"""What runs on all ranks: a candidate in earnest, and messages by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fds.collectives import mesh
from fds.collectives.measuring import time_collective
from fds.profiling.peaks import of_second_call
from fds.tuning.problem import Problem
from fds.tuning.rehearsal import Message, alone, time_calls
from fds.tuning.spaces import Candidate

Tell = Callable[[Any], None]
Link = tuple[tuple[tuple[str, int], ...], Message]  # sizes of the axes of the mesh, and a message on it


def run_candidate(tell: Tell, problem: Problem, candidate: Candidate, seconds: float) -> None:
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


def time_messages(tell: Tell, links: tuple[Link, ...], device: str, seconds: float) -> None:
    """Tell for each kind of message the seconds that one takes, all ranks sending it again and again.

    What a rank does for it alone, such as adding up what it has received, is not in them: a rehearsal has done that.
    """
    for axes, message in links:
        axis = mesh(**dict(axes))[tuple(message.axis.split(","))]
        run = lambda: time_collective(axis, message.op, message.num_bytes, torch.device(device), seconds)  # noqa: B023
        together = run()
        with alone():
            tell(max(0.0, together - run()))
