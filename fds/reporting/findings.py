"""What a run comes to: its numbers at a glance, what deserves a look, and in what runs differ."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from fds import _html
from fds.errors import FdsError
from fds.plans import Plan, Timeline, simulate
from fds.reporting.run import WHOLE, Run
from fds.reporting.series import SAMPLES, TIMES, Series, evaluates, finite, typical

UNKNOWN = "–"
WINDOW = 32  # points before one that say what was to be expected of it
DEVIATIONS = 8.0  # standard deviations of them, by their median deviation, that are a spike
SHARE = 0.2  # of a call that is a long wait, or of a pipeline that is a large bubble
MOST_ACTIONS = 50_000  # of a plan that is simulated for a page


@attrs.frozen
class Finding:
    """A remark on a run.

    Attributes:
        level: "problem", where numbers are wrong or lost, or "note".
        what: a sentence.
        metric: that it is about, or none.
        at: x of the points that it is about.
    """

    level: str
    what: str
    metric: str = ""
    at: tuple[float, ...] = ()


def findings(run: Run) -> list[Finding]:
    """Return what of a run deserves a look, problems first."""
    remarks = [*_of_curves(run), *_of_speeds(run), *_of_ranks(run)]
    for file in run.cut:
        what = f"{file} ends in half a line, which is left out: its process was killed, or is writing"
        remarks.append(Finding("note", what))
    for file, why in run.unreadable.items():
        remarks.append(Finding("note", f"{file} was not read: {why.splitlines()[0]}"))
    return sorted(remarks, key=lambda remark: remark.level != "problem")


def timeline(run: Run) -> Timeline | None:
    """Return the plan of a run's pipeline, simulated with equal stages; None without one, and for one too large."""
    if not 0 < sum(row.count(" ") + 1 for row in run.record.plan) <= MOST_ACTIONS:
        return None
    try:
        return simulate(Plan.of(run.record.plan))
    except FdsError:
        return None


def spikes(series: Series) -> np.ndarray:
    """Return the x at which values jump far above those before; of several in a row the first.

    Far is `DEVIATIONS` standard deviations above the median of the `WINDOW` values before, and a tenth of it.
    """
    points = finite(series)
    if len(points) <= WINDOW:
        return points.x[:0]
    before = np.lib.stride_tricks.sliding_window_view(points.y, WINDOW)[:-1]
    jumps: list[np.ndarray] = []
    for part in range(0, len(before), 1 << 15):  # a window of each value, some megabytes at a time
        windows, values = before[part : part + (1 << 15)], points.y[WINDOW + part : WINDOW + part + (1 << 15)]
        middle = np.median(windows, axis=1)
        deviation = 1.4826 * np.median(np.abs(windows - middle[:, None]), axis=1)
        jumps.append(values > middle + np.maximum(DEVIATIONS * deviation, 0.1 * np.abs(middle)))
    high = np.concatenate(jumps)
    first = high & ~np.concatenate([[False], high[:-1]])
    return points.x[WINDOW:][first]


def _of_curves(run: Run) -> Iterator[Finding]:
    for name, series in run.series.items():
        if len(wrong := series.x[~np.isfinite(series.y)]):
            level = "problem" if name == "loss" or evaluates(name) else "note"
            yield Finding(level, f"{name} is not finite at {_where(series, wrong)}", name, _marks(wrong))
    for name, meaning in {
        "skipped": "the update was skipped",
        "at_minimum_scale": "the loss scale is as small as it may be",
        "rolled_back": "the update was made again, from the old values",
    }.items():
        if (series := run.series.get(name)) is not None and len(where := series.x[series.y > 0]):
            level = "problem" if name == "at_minimum_scale" else "note"
            share = f" ({len(where) / len(series):.1%} of those logged)"
            yield Finding(level, f"{meaning} at {_where(series, where)}{share}", name, _marks(where))
    if (series := run.series.get("loss")) is not None and len(where := spikes(series)):
        yield Finding("problem", f"the loss jumps at {_where(series, where)}", "loss", _marks(where))
    for name, series in run.series.items():
        if name.endswith("loss") and evaluates(name) and len(points := finite(series)) > 2:
            best, last = int(np.argmin(points.y)), points.y[-1]
            if last > points.y[best] + 0.05 * abs(points.y[best]):
                now = f"{points.y[best]:.4g} at {series.axis[:-1]} {points.x[best]:,.0f}, and is {last:.4g} now"
                yield Finding("note", f"{name} was lowest with {now}", name, (float(points.x[best]),))


def _of_speeds(run: Run) -> Iterator[Finding]:
    for name in ("tokens_per_s", "samples_per_s"):
        if (series := run.latest(name)) is not None and len(points := finite(series)) >= 4 * WINDOW:
            quarters = [float(np.median(part)) for part in np.array_split(points.y, 4)]
            if quarters[-1] < 0.8 * max(quarters):
                speeds = f"{quarters[-1]:,.0f} in the last quarter of the run, {max(quarters):,.0f} in the fastest"
                yield Finding("note", f"{name} fell: {speeds}", name)
                break
    call, wait = (run.latest(TIMES + name) for name in ("call", "wait"))
    if call is not None and wait is not None:
        whole, waited = float(np.nansum(call.y)), float(np.nansum(wait.y))
        if waited > SHARE * whole:
            what = f"the first rank waits for messages, and so for other ranks, {waited / whole:.0%} of a call"
            yield Finding("note", what, TIMES + "wait")
    place = lambda start: start.topology or "ranks that are not known"
    for before, start in itertools.pairwise(run.record.starts):
        if before.topology != start.topology:
            what = f"from call {start.calls:,} on the run was on {place(start)}, before on {place(before)}"
            yield Finding("note", f"{what}: its speeds are told apart")


def _of_ranks(run: Run) -> Iterator[Finding]:
    if (line := timeline(run)) is not None and line.bubble_fraction > SHARE:
        share = f"{line.bubble_fraction:.0%} of the time, if all stages cost the same"
        yield Finding("note", f"the bubble of {run.record.schedule} is {share}: more microbatches make it smaller")
    for file, slices in run.traces.items():
        work: dict[int, float] = {}  # milliseconds of each rank from its first part to its last, without waits
        for slice in slices:
            sign = {WHOLE: 1.0, "wait": -1.0}.get(slice.part, 0.0)
            work[slice.rank] = work.get(slice.rank, 0.0) + sign * slice.ms
        work = {rank: ms for rank, ms in work.items() if ms > 0}
        middle = float(np.median(list(work.values()))) if work else 0.0
        slow = [f"rank {rank} ({ms / middle:.2f} times)" for rank, ms in work.items() if ms > 1.2 * middle > 0]
        if slow:
            yield Finding("note", f"by {file} these ranks work longer than the typical one: {', '.join(slow[:8])}")
    ranks = () if run.messages is None else run.messages.ranks
    waits = {waits.rank: waits.for_others_ms for waits in ranks}
    middle = float(np.median(list(waits.values()))) if waits else 0.0
    late = [f"rank {rank}" for rank, ms in waits.items() if ms < middle / 4]
    if late:
        yield Finding("note", f"the others wait for {', '.join(late[:8])}: {middle:,.1f} ms in the messages compared")


def _where(series: Series, xs: np.ndarray) -> str:
    """Return `3 steps: 12, 13, 20`, or of many the first and the last."""
    shown = [f"{x:,.0f}" for x in xs]
    listed = ", ".join(shown) if len(shown) <= 6 else f"{', '.join(shown[:3])}, ... {shown[-1]}"
    if series.axis == SAMPLES:
        return f"{len(xs):,} step{'s' * (len(xs) > 1)}, after {listed} samples"
    return f"step {listed}" if len(xs) == 1 else f"{len(xs):,} steps: {listed}"


def _marks(xs: np.ndarray) -> tuple[float, ...]:
    return tuple(map(float, xs[:200]))


def figures(run: Run) -> dict[str, str]:
    """Return name -> number with its unit, of what is known of a run."""
    numbers: dict[str, str] = {}
    for name in ("loss", *(name for name in run.series if name == "held_out" or evaluates(name))):
        if name in run.series and len(points := finite(run.series[name])):
            last = float(np.mean(points.y[-max(1, len(points) // 50) :])) if name == "loss" else float(points.y[-1])
            numbers[name] = f"{last:.4g}"
            if name != "loss" and len(points) > 1:
                numbers[f"lowest {name}"] = f"{points.y.min():.4g}"
    ends = {series.axis: 0.0 for series in run.series.values()}
    for series in run.series.values():
        ends[series.axis] = max(ends[series.axis], float(series.x[-1]))
    numbers |= {axis: f"{end:,.0f}" for axis, end in ends.items()}
    seconds = [float(x) for series in run.series.values() if math.isfinite(x := float(np.max(series.seconds)))]
    if seconds:
        numbers["time"] = duration(max(seconds))
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
                numbers[on] = f"{value:,.0f}{unit}" if value >= 1000 else f"{value:.3g}{unit}"
    if (skipped := run.series.get("skipped")) is not None:
        numbers["skipped"] = f"{int(np.nansum(skipped.y > 0)):,}"
    if run.record.num_bytes:
        numbers["held by a rank"] = _html.num_bytes(sum(run.record.num_bytes.values()))
    if run.record.environment.get("ranks"):
        numbers["ranks"] = run.record.environment["ranks"]
    if run.record.starts:
        numbers["started"] = run.record.starts[0].at.replace("T", " ").replace("+00:00", " UTC")
    return numbers


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
    records = [
        {
            **dict(flat(run.record.configuration)),
            **{f"step: {station}": text for station, text in run.record.stations.items()},
            **run.record.environment,
        }
        for run in runs
    ]
    return [row for row in side_by_side(records) if len({*row[1:]}) > 1]


def side_by_side(columns: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """Return a row for each name: what stands there in every column."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(column.get(name, UNKNOWN) for column in columns)) for name in names]


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
