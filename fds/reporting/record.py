"""`run.json`: what a run says of itself once, when it begins: configuration, composition, bytes, plan, environment."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import cattrs
import torch

from fds import __version__
from fds.collectives import mesh
from fds.errors import FdsError, checked_call, expanded, is_a
from fds.state import State
from fds.step import Step
from fds.transforms.pipeline.station import Pipeline

NAME = "run.json"
FORMAT = 1  # incremented when a reader of the previous format could misread a file


@attrs.frozen
class Start:
    """A process that began the run, or went on with it."""

    at: str  # ISO 8601, in UTC
    calls: int  # of the state that it began with
    topology: str = ""  # its ranks and axes, as text; a record of an older fds does not say


@attrs.frozen
class Record:
    """What a run says of itself.

    Attributes:
        starts: of its processes, in order, also of those that a later one went back behind.
        configuration: as the user wrote it.
        explain: what the configuration came to, a text.
        stations: station of the step -> what fills it.
        describe: the step in words, those of `step.describe(state)`.
        num_bytes: part -> bytes that the first rank holds.
        places: place -> bytes of the state that live there, where some live elsewhere than on the device.
        sent: station -> bytes that a rank sends in a step, predicted.
        schedule: name of the pipeline's; empty where there is none.
        plan: of the pipeline: a row of actions for each rank, as text.
        environment: name -> versions, machine, ranks, program, commit.
    """

    format: int
    starts: tuple[Start, ...]
    configuration: dict[str, Any] = attrs.field(factory=dict)
    explain: str = ""
    stations: dict[str, str] = attrs.field(factory=dict)
    describe: str = ""
    num_bytes: dict[str, int] = attrs.field(factory=dict)
    places: dict[str, int] = attrs.field(factory=dict)
    sent: dict[str, int] = attrs.field(factory=dict)
    schedule: str = ""
    plan: tuple[str, ...] = ()
    environment: dict[str, str] = attrs.field(factory=dict)


def read_record(path: Path) -> Record:
    """Read the record of a run. Raises `FdsError` for anything else, and `OSError`."""
    try:
        record = cattrs.structure(json.loads(path.read_bytes()), Record)
    except (ValueError, TypeError, cattrs.BaseValidationError) as error:
        is_of_fields = isinstance(error, cattrs.BaseValidationError)
        got = next(iter(cattrs.transform_error(error))) if is_of_fields else str(error)
        what, want = "this is not the record of a run", "what fds.record_run writes"
        raise FdsError(what, where=str(path), got=got, want=want) from None
    if record.format != FORMAT:
        raise FdsError("a record of another format", where=str(path), got=str(record.format), want=str(FORMAT))
    return record


def describe_environment(device: torch.device, axes: dict[str, int], num_ranks: int) -> dict[str, str]:
    """Return name -> text of what numbers and speeds of a run may depend on; what cannot be found is left out."""
    texts = {
        "fds": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "machine": platform.node(),
        "system": platform.platform(),
        "processor": _read_processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        "memory": _read_memory(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "ranks": str(num_ranks),
        "axes": ", ".join(f"{name}={size}" for name, size in axes.items()),
        "program": shlex.join(sys.argv),
        "commit": _read_commit(Path("".join(sys.argv[:1]) or "-c").resolve().parent),
    }
    return {name: text for name, text in texts.items() if text}


def _read_processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _read_memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (ValueError, OSError):
        return ""


def _read_commit(folder: Path) -> str:
    """Return the commit that a folder is at, and whether files of it were changed; empty where there is none."""

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=True).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        return head and head + ", with changes" * bool(git("status", "--porcelain", "--untracked-files=no"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""


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
            want = "fds.record_run(directory, step, state)"
            raise FdsError(f"not a {name}", where="record_run", got=type(value).__name__, want=want)
    if config is not None and not is_a(config, Mapping):
        raise FdsError("not options", where="record_run, config", got=type(config).__name__, want="a dict, or None")
    if not is_a(explain, str):
        raise FdsError("not a text", where="record_run, explain", got=type(explain).__name__, want="a str")
    try:
        configuration = json.loads(json.dumps(_with_text_keys(config or {}), default=str))
    except (ValueError, RecursionError) as error:  # that contain themselves
        raise FdsError("options that JSON cannot hold", where="record_run, config", got=str(error)) from None
    described = step.describe(state)
    schedule, plan = "", ()
    if isinstance(step.execute, Pipeline):
        schedule, plan = step.execute.name, tuple(" ".join(map(str, row)) for row in step.execute.plan.plan.rows)
    axis = mesh(ranks=-1)["ranks"]
    problem = ""
    if axis.index == 0:
        path, calls = Path(expanded(directory)), int(state.calls)
        axes = {dimension.axis.name: dimension.axis.size for dimension in step.topology if dimension.axis is not None}
        ranks = f"{axis.size} rank{'s' * (axis.size > 1)}"
        topology = ", ".join([ranks, *(f"{name}={size}" for name, size in axes.items())])
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        try:
            earlier = read_record(path / NAME).starts if (path / NAME).exists() else ()
            record = Record(
                format=FORMAT,
                starts=(*earlier, Start(now, calls, topology)),
                configuration=configuration,
                explain=explain,
                stations=described.stations,
                describe=str(described),
                num_bytes=described.num_bytes,
                places=described.places,
                sent=described.sent,
                schedule=schedule,
                plan=plan,
                environment=describe_environment(state.step.device, axes, axis.size),
            )
            path.mkdir(parents=True, exist_ok=True)
            half = path / f".{NAME}.half"  # written whole or not at all
            half.write_text(json.dumps(cattrs.unstructure(record), indent=1) + "\n")
            os.replace(half, path / NAME)
        except (OSError, ValueError) as error:  # an FdsError is one
            problem = str(error)
    problem = axis.exchange(problem, "the record of a run")[0]
    if problem:
        raise FdsError("the run cannot be recorded", where=f"record_run, {directory}", got=problem)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _with_text_keys(inside) for name, inside in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list | tuple) else value
