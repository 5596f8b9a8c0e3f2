"""`trace`: one call of a step on all ranks, as a file for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fds.collectives import Axis, mesh
from fds.collectives.traffic import counting
from fds.errors import FdsError, checked_call, expanded, is_a
from fds.state import State
from fds.step import Step
from fds.step.ranges import Clock, clocked
from fds.timing._timed import milliseconds
from fds.timing.waits import Waits

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # ranks of one machine share its clock
_ROUNDS = 9


@checked_call
def trace(step: Step, state: State, batch: Any, path: str | Path) -> tuple[State, dict[str, Tensor]]:
    """Call a step, and write what each rank did when; return what the step returns.

    All ranks call it, with their batches, and the first writes the file: a process for each rank, with the parts of the
    step, in a pipeline each with its stage and microbatch, and inside them the waits for messages, each with its
    operation, shape and axis. Clocks of several machines are aligned by barriers, to about as much as one takes. The
    second call of a step is a better one to trace than the first, which makes buffers and plans.

    Raises `FdsError`, on all ranks and before the step runs, for arguments of another kind and a file that cannot be
    written; and what the step raises.
    """
    if not is_a(step, Step):
        raise FdsError("not a step", where="trace", got=type(step).__name__, want="fds.trace(step, state, batch, path)")
    if not is_a(state, State):
        raise FdsError(
            "not a state", where="trace", got=type(state).__name__, want="fds.trace(step, state, batch, path)"
        )
    axis = mesh(ranks=-1)["ranks"]
    _check_writable(axis, path)
    ahead, clock = _ahead_of_the_first(axis), Clock(state.step.device)
    _synchronize(clock.device)
    start = time.perf_counter() - ahead
    with counting(Waits()), clocked(clock), clock.range("step"):
        result = step(state, batch)
    _synchronize(clock.device)
    ranks = axis.exchange([[name, start * 1e3 + at, ms] for name, at, ms in _slices(clock)], "trace")
    if axis.index == 0:
        Path(expanded(path)).write_text(json.dumps({"traceEvents": _events(ranks), "displayTimeUnit": "ms"}))
    return result


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _check_writable(axis: Axis, path: str | Path) -> None:
    """Raise `FdsError` on all ranks where the first cannot write the file."""
    problem = ""
    if axis.index == 0:
        try:
            Path(expanded(path)).parent.mkdir(parents=True, exist_ok=True)
            Path(expanded(path)).open("a").close()
        except (OSError, TypeError) as error:
            problem = str(error)
    problem = axis.exchange(problem, "the file of a trace")[0]
    if problem:
        raise FdsError("the trace cannot be written", where=f"trace, {path}", got=problem)


def _ahead_of_the_first(axis: Axis) -> float:
    """Return by how many seconds this rank's clock is ahead of the first rank's; 0 on the same machine."""
    machines = axis.exchange(_BOOT.read_text() if _BOOT.exists() else "", "machines")
    found: list[float] = []
    for _ in range(_ROUNDS if len({*machines}) > 1 else 0):
        axis.barrier()
        now = time.perf_counter()
        found.append(now - axis.exchange(now, "clocks")[0])
    return sorted(found)[len(found) // 2] if found and machines[axis.index] != machines[0] else 0.0


def _slices(clock: Clock) -> list[tuple[str, float, float]]:
    """Return (name, start, length) of every range, in milliseconds after the first mark."""
    found, open_ = [], list[tuple[str, float]]()
    for name, at in clock.marks:
        now = milliseconds(clock.marks[0][1], at)
        if name:
            open_.append((name, now))
        else:
            begun, start = open_.pop()
            found.append((begun, start, now - start))
    return found


def _events(ranks: list[list[tuple[str, float, float]]]) -> list[dict[str, Any]]:
    """Return the events of Chrome's format: a process for each rank; time 0 is when the first begins."""
    first = min(at for rank in ranks for _, at, _ in rank)
    named = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}} for rank in range(len(ranks))
    ]
    return named + [
        {"name": name, "cat": name.split("/")[0], "ph": "X", "pid": rank, "tid": 0,
         "ts": (at - first) * 1e3, "dur": ms * 1e3}
        for rank, slices in enumerate(ranks)
        for name, at, ms in sorted(slices, key=lambda one: (one[1], -one[2]))
    ]  # fmt: skip
