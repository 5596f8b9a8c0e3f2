"""`to_chrome`: a timeline as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fds.errors import PlanError
from fds.plans.actions import COMPUTE, SENDS, Op
from fds.plans.timeline import Event, Timeline, check_timeline

# colour names that both viewers know
_COLORS = {
    Op.FORWARD: "thread_state_running",
    Op.BACKWARD_INPUT: "thread_state_runnable",
    Op.BACKWARD_WEIGHT: "good",
    Op.BACKWARD: "thread_state_iowait",
}
_COMPUTE, _MESSAGES = 0, 1  # threads, since messages overlap computations


def to_chrome(timeline: Timeline, path: str | Path | None = None) -> dict[str, Any]:
    """Return the trace, and write it to `path` as JSON if there is one.

    A rank is a process; its computations are one thread, messages and the other lowered actions another. A unit of the
    timeline is shown as a second. Raises `PlanError` for a plan that was not simulated, and if the file cannot be
    written.

    Source: "Trace Event Format", complete events (ph X, ts and dur in microseconds)
    """
    check_timeline(timeline, "to_chrome")
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(timeline.rows):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        names = ["compute"] if all(e.action.op in COMPUTE for e in row) else ["compute", "messages"]
        for thread, name in enumerate(names):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
        events += [_complete(rank, event) for event in row]
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    if path is not None:
        try:
            Path(path).write_text(json.dumps(trace))
        except OSError as error:
            raise PlanError("the trace cannot be written", where=str(path), got=str(error)) from error
    return trace


def _complete(rank: int, event: Event) -> dict[str, Any]:
    action = event.action
    computes = action.op in COMPUTE
    numbers = {"stage": action.stage, "microbatch": action.microbatch, "buffer": action.buffer}
    trace_event: dict[str, Any] = {
        "ph": "X",
        "name": str(action),
        "cat": "compute" if computes else "send" if action.op in SENDS else "other",
        "pid": rank,
        "tid": _COMPUTE if computes else _MESSAGES,
        "ts": event.start * 1e6,
        "dur": (event.end - event.start) * 1e6,
        "args": {name: value for name, value in numbers.items() if value is not None},
    }
    return {**trace_event, "cname": _COLORS[action.op]} if computes else trace_event
