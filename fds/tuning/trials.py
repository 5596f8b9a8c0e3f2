"""What runs on all ranks: a candidate in earnest, and messages by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fds.collectives import Axis, mesh
from fds.profiling.peaks import of_second_call
from fds.tuning.problem import Problem
from fds.tuning.rehearsal import BLOCKS, Message, time_calls
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
    """Tell for each kind of message the seconds that one takes, all ranks sending it again and again."""
    for axes, message in links:
        axis = mesh(**dict(axes))[tuple(message.axis.split(","))]
        tell(_timed(axis, message, device, seconds))


def _timed(axis: Axis, message: Message, device: str, seconds: float) -> float:
    send = _sender(axis, message, device)

    def run(count: int) -> float:
        axis.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            send()
        if device != "cpu":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    run(2)
    count = max(axis.exchange(max(3, min(1000, int(seconds / max(run(2), 1e-6))))))
    return sorted(run(count) for _ in range(BLOCKS))[BLOCKS // 2]


def _sender(axis: Axis, message: Message, device: str) -> Callable[[], Any]:
    """Return what sends one such message and waits for it; of float32, which gloo adds as fast as it can."""
    whole = torch.zeros(max(message.num_bytes // 4, axis.size) // axis.size * axis.size, device=device)
    part = torch.zeros(len(whole) // axis.size, device=device)
    peer = axis.index ^ 1
    sends: Mapping[str, Callable[[], Any]] = {
        "all_reduce": lambda: axis.start_all_reduce(whole).wait(),
        "all_gather": lambda: axis.start_all_gather(whole, part).wait(),
        "reduce_scatter": lambda: axis.start_reduce_scatter(part, whole).wait(),
        "all_to_all": lambda: axis.start_all_to_all(torch.empty_like(whole), whole).wait(),
        "broadcast": lambda: axis.start_broadcast(whole, 0).wait(),
        "barrier": axis.barrier,
        "exchange": lambda: axis.exchange(0),
        "send": lambda: (axis.start_send(whole, peer) if axis.index < peer else axis.start_recv(whole, peer)).wait(),
        "recv": lambda: None,  # it is counted where it is sent
    }
    if message.op == "send" and peer >= axis.size:
        return lambda: None
    return sends[message.op]
