"""The numbers of a run at a glance, and in what runs differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fds import _html
from fds.reporting.charts import typical
from fds.reporting.metrics import TIMES, evaluates
from fds.reporting.run import Run
from fds.reporting.series import finite

UNKNOWN = "–"


def figures(run: Run) -> dict[str, str]:
    """Return name -> number with its unit, of what is known of a run."""
    found: dict[str, str] = {}
    for name in ("loss", *(name for name in run.series if name == "held_out" or evaluates(name))):
        if name in run.series and len(known := finite(run.series[name])):
            last = float(np.mean(known.y[-max(1, len(known) // 50) :])) if name == "loss" else float(known.y[-1])
            found[name] = f"{last:.4g}"
            if name != "loss" and len(known) > 1:
                found[f"lowest {name}"] = f"{known.y.min():.4g}"
    ends = {series.axis: 0.0 for series in run.series.values()}
    for series in run.series.values():
        ends[series.axis] = max(ends[series.axis], float(series.x[-1]))
    found |= {axis: f"{end:,.0f}" for axis, end in ends.items()}
    seconds = [float(x) for one in run.series.values() if math.isfinite(x := float(np.max(one.seconds)))]
    if seconds:
        found["time"] = duration(max(seconds))
    for name, label, unit, scale in (
        ("samples_per_s", "speed", " samples/s", 1.0),
        ("tokens_per_s", "speed", " tokens/s", 1.0),  # in the place of samples
        ("flops_per_s", "model flops", " Gflop/s", 1e-9),
        ("mfu", "MFU", " %", 100.0),
        (f"{TIMES}call", "time of a call", " ms", 1.0),
    ):
        parts = {} if name not in run.series else run.by_topology(run.series[name])
        for topology, part in parts.items():
            if math.isfinite(value := typical(part) * scale):
                on = f"{label} on {topology or 'ranks that are not known'}" if len(parts) > 1 else label
                found[on] = f"{value:,.0f}{unit}" if value >= 1000 else f"{value:.3g}{unit}"
    if (skipped := run.series.get("skipped")) is not None:
        found["skipped"] = f"{int(np.nansum(skipped.y > 0)):,}"
    if run.record.num_bytes:
        found["held by a rank"] = _html.num_bytes(sum(run.record.num_bytes.values()))
    if run.record.environment.get("ranks"):
        found["ranks"] = run.record.environment["ranks"]
    if run.record.starts:
        found["started"] = run.record.starts[0].at.replace("T", " ").replace("+00:00", " UTC")
    return found


def duration(seconds: float) -> str:
    """Return a time for people.

    >>> duration(4.25), duration(4000)
    ('4.2 s', '1:06:40')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02} min"


def differences(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Return what runs differ in: configuration, stations, environment; a name, and what each run has there."""
    told = [dict(_told(run)) for run in runs]
    names = dict.fromkeys(name for one in told for name in one)
    rows = [(name, *(one.get(name, UNKNOWN) for one in told)) for name in names]
    return [row for row in rows if len({*row[1:]}) > 1]


def _told(run: Run) -> Iterator[tuple[str, str]]:
    yield from flat(run.record.configuration)
    yield from ((f"step: {station}", text) for station, text in run.record.stations.items())
    yield from ((name, text) for name, text in run.record.environment.items())


def flat(configuration: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the value of every option.

    >>> list(flat({"optimizer": {"lr": 0.1}, "betas": [0.9, 0.95], "name": "x"}))
    [('optimizer.lr', '0.1'), ('betas', '[0.9, 0.95]'), ('name', 'x')]
    """
    for name, value in configuration.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value if isinstance(value, str) else json.dumps(value)
