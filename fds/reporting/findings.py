"""What of a run deserves a look: losses that jump, steps that were skipped, ranks that wait."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs
import numpy as np

from fds.errors import FdsError
from fds.plans import Plan, Timeline, simulate
from fds.reporting.lanes import busy
from fds.reporting.metrics import TIMES, evaluates
from fds.reporting.run import Run
from fds.reporting.series import Series, finite

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
    found = [*_not_finite(run), *_skipped(run), *_spikes(run), *_worse(run), *_slower(run), *_waits(run)]
    found += [*_moved(run), *_bubble(run), *_stragglers(run), *_late(run), *_cut(run), *_unreadable(run)]
    return sorted(found, key=lambda one: one.level != "problem")


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
    known = finite(series)
    if len(known) <= WINDOW:
        return known.x[:0]
    before = np.lib.stride_tricks.sliding_window_view(known.y, WINDOW)[:-1]
    jumps: list[np.ndarray] = []
    for part in range(0, len(before), 1 << 15):  # a window of each value, some megabytes at a time
        windows, values = before[part : part + (1 << 15)], known.y[WINDOW + part : WINDOW + part + (1 << 15)]
        middle = np.median(windows, axis=1)
        deviation = 1.4826 * np.median(np.abs(windows - middle[:, None]), axis=1)
        jumps.append(values > middle + np.maximum(DEVIATIONS * deviation, 0.1 * np.abs(middle)))
    high = np.concatenate(jumps)
    first = high & ~np.concatenate([[False], high[:-1]])
    return known.x[WINDOW:][first]


def _not_finite(run: Run) -> Iterator[Finding]:
    for name, series in run.series.items():
        if len(wrong := series.x[~np.isfinite(series.y)]):
            level = "problem" if name == "loss" or evaluates(name) else "note"
            yield Finding(level, f"{name} is not finite at {_where(series, wrong)}", name, _marks(wrong))


def _skipped(run: Run) -> Iterator[Finding]:
    for name, meaning in {
        "skipped": "the update was skipped",
        "at_minimum_scale": "the loss scale is as small as it may be",
        "rolled_back": "the update was made again, from the old values",
    }.items():
        if (series := run.series.get(name)) is not None and len(where := series.x[series.y > 0]):
            level = "problem" if name == "at_minimum_scale" else "note"
            share = f" ({len(where) / len(series):.1%} of those logged)"
            yield Finding(level, f"{meaning} at {_where(series, where)}{share}", name, _marks(where))


def _spikes(run: Run) -> Iterator[Finding]:
    if (series := run.series.get("loss")) is not None and len(where := spikes(series)):
        yield Finding("problem", f"the loss jumps at {_where(series, where)}", "loss", _marks(where))


def _worse(run: Run) -> Iterator[Finding]:
    for name, series in run.series.items():
        if name.endswith("loss") and evaluates(name) and len(known := finite(series)) > 2:
            best = int(np.argmin(known.y))
            if known.y[-1] > known.y[best] + 0.05 * abs(known.y[best]):
                now = f"{known.y[best]:.4g} at {series.axis[:-1]} {known.x[best]:,.0f}, and is {known.y[-1]:.4g} now"
                yield Finding("note", f"{name} was lowest with {now}", name, (float(known.x[best]),))


def _slower(run: Run) -> Iterator[Finding]:
    for name in ("tokens_per_s", "samples_per_s"):
        if (series := run.latest(name)) is not None and len(known := finite(series)) >= 4 * WINDOW:
            quarters = [float(np.median(part)) for part in np.array_split(known.y, 4)]
            if quarters[-1] < 0.8 * max(quarters):
                speeds = f"{quarters[-1]:,.0f} in the last quarter of the run, {max(quarters):,.0f} in the fastest"
                yield Finding("note", f"{name} fell: {speeds}", name)
                return


def _waits(run: Run) -> Iterator[Finding]:
    call, wait = (run.latest(TIMES + name) for name in ("call", "wait"))
    if call is None or wait is None:
        return
    whole, waited = float(np.nansum(call.y)), float(np.nansum(wait.y))
    if waited > SHARE * whole:
        what = f"the first rank waits for messages, and so for other ranks, {waited / whole:.0%} of a call"
        yield Finding("note", what, TIMES + "wait")


def _moved(run: Run) -> Iterator[Finding]:
    name = lambda start: start.topology or "ranks that are not known"
    for before, start in itertools.pairwise(run.record.starts):
        if before.topology != start.topology:
            what = f"from call {start.calls:,} on the run was on {name(start)}, before on {name(before)}"
            yield Finding("note", f"{what}: its speeds are told apart")


def _bubble(run: Run) -> Iterator[Finding]:
    if (line := timeline(run)) is not None and line.bubble_fraction > SHARE:
        share = f"{line.bubble_fraction:.0%} of the time, if all stages cost the same"
        yield Finding("note", f"the bubble of {run.record.schedule} is {share}: more microbatches make it smaller")


def _stragglers(run: Run) -> Iterator[Finding]:
    for file, events in run.traces.items():
        work = busy(events)
        typical = float(np.median(list(work.values()))) if work else 0.0
        slow = [f"rank {rank} ({ms / typical:.2f} times)" for rank, ms in work.items() if ms > 1.2 * typical > 0]
        if slow:
            yield Finding("note", f"by {file} these ranks work longer than the typical one: {', '.join(slow[:8])}")


def _late(run: Run) -> Iterator[Finding]:
    ranks = () if run.messages is None else run.messages.ranks
    waits = {one.rank: one.for_others_ms for one in ranks}
    typical = float(np.median(list(waits.values()))) if waits else 0.0
    late = [f"rank {rank}" for rank, ms in waits.items() if ms < typical / 4]
    if late:
        yield Finding("note", f"the others wait for {', '.join(late[:8])}: {typical:,.1f} ms in the messages compared")


def _cut(run: Run) -> Iterator[Finding]:
    for file in run.cut:
        yield Finding("note", f"{file} ends in half a line, which is left out: its process was killed, or is writing")


def _unreadable(run: Run) -> Iterator[Finding]:
    for file, why in run.unreadable.items():
        yield Finding("note", f"{file} was not read: {why.splitlines()[0]}")


def _where(series: Series, xs: np.ndarray) -> str:
    """Return `3 steps: 12, 13, 20`, or of many the first and the last."""
    shown = [f"{x:,.0f}" for x in xs]
    listed = ", ".join(shown) if len(shown) <= 6 else f"{', '.join(shown[:3])}, ... {shown[-1]}"
    one = series.axis[:-1]
    if series.axis == "samples":
        return f"{len(xs):,} step{'s' * (len(xs) > 1)}, after {listed} samples"
    return f"{one} {listed}" if len(xs) == 1 else f"{len(xs):,} steps: {listed}"


def _marks(xs: np.ndarray) -> tuple[float, ...]:
    return tuple(map(float, xs[:200]))
