"""`record_run`: what a run is, written down when it begins."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fds.collectives import mesh
from fds.errors import FdsError, checked_call, expanded, is_a
from fds.reporting.environment import environment
from fds.reporting.record import FORMAT, NAME, Record, Start, read_record, write_record
from fds.state import State
from fds.step import Step
from fds.transforms.pipeline.station import Pipeline

_WANT = "fds.record_run(directory, step, state)"


@checked_call
def record_run(
    directory: str | Path, step: Step, state: State, *, config: Mapping[str, Any] | None = None, explain: str = ""
) -> None:
    """Write `run.json` into a run's directory: what `fds report` shows beside the metrics.

        fds.record_run("runs/one", step, state, config=vars(options))
        with fds.monitor(fds.monitors.JSONL("runs/one/log.jsonl")) as monitor:
            ...

    It holds the configuration, the composition and its bytes in words (`step.describe(state)`), the plan of a pipeline,
    and where the run runs: versions, machine, ranks, the command line, the commit. Call it once, before the first step,
    on every rank; the first one writes. A run that goes on calls it again, and its start is added to those before.

    Args:
        directory: of the run; it is made.
        step: that trains.
        state: that the run begins or goes on with.
        config: options by name, nested as they are: a DeepSpeed JSON, `vars(options)`. What JSON does not have is
            written as text.
        explain: what the configuration came to, such as `TrainingConfig.explain(mesh)`.

    Raises `FdsError`, on all ranks, for arguments of another kind, a directory that cannot be written, and a `run.json`
    that is none, which stays as it is.
    """
    for value, kind, name in ((step, Step, "step"), (state, State, "state"), (directory, str | Path, "directory")):
        if not is_a(value, kind):
            raise FdsError(f"not a {name}", where="record_run", got=type(value).__name__, want=_WANT)
    if config is not None and not is_a(config, Mapping):
        raise FdsError("not options", where="record_run, config", got=type(config).__name__, want="a dict, or None")
    if not is_a(explain, str):
        raise FdsError("not a text", where="record_run, explain", got=type(explain).__name__, want="a str")
    configuration = _as_json(config or {})
    described = step.describe(state)
    plan = step.execute.plan.plan if isinstance(step.execute, Pipeline) else None
    axis = mesh(ranks=-1)["ranks"]
    problem = ""
    if axis.index == 0:
        path, calls = Path(expanded(directory)), int(state.calls)
        axes = {one.axis.name: one.axis.size for one in step.topology if one.axis is not None}
        try:
            earlier = read_record(path / NAME).starts if (path / NAME).exists() else ()
            record = Record(
                FORMAT,
                (*earlier, Start(_now(), calls, _topology(axes, axis.size))),
                configuration,
                explain,
                described.stations,
                str(described),
                described.num_bytes,
                described.places,
                described.sent,
                step.execute.name if isinstance(step.execute, Pipeline) else "",
                () if plan is None else tuple(" ".join(map(str, row)) for row in plan.rows),
                environment(state.step.device, axes, axis.size),
            )
            write_record(path, record)
        except (OSError, ValueError) as error:  # an FdsError is one
            problem = str(error)
    problem = axis.exchange(problem, "the record of a run")[0]
    if problem:
        raise FdsError("the run cannot be recorded", where=f"record_run, {directory}", got=problem)


def _topology(axes: Mapping[str, int], num_ranks: int) -> str:
    return ", ".join([f"{num_ranks} rank{'s' * (num_ranks > 1)}", *(f"{n}={size}" for n, size in axes.items())])


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as JSON has them. Raises `FdsError` for those that contain themselves."""
    try:
        return json.loads(json.dumps(_keyed(config), default=str))
    except (ValueError, RecursionError) as error:
        raise FdsError("options that JSON cannot hold", where="record_run, config", got=str(error)) from None


def _keyed(value: Any) -> Any:
    """Return a value whose mappings have texts as keys."""
    if isinstance(value, Mapping):
        return {str(name): _keyed(one) for name, one in value.items()}
    return [_keyed(one) for one in value] if isinstance(value, list | tuple) else value
