"""What the timing of kernels comes to: goals and whether they are met, lines, tables. Made from records at any time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator

from benchmarks.kernel_timing import AGAIN, COPY, Timed
from benchmarks.report import Rows

HEADER = [
    "contender",
    "size",
    "other",
    "ms",
    "its ms",
    "ratio",
    "95% interval",
    "of copy",
    "TFLOP/s",
    "peak MiB",
    "host us",
]


def goals(one: Timed) -> Iterator[tuple[str, str, bool]]:
    """Yield (goal, what came of it, whether it is met); where the interval reaches it, it is met."""
    wanted, first = one.goals, one.first
    if first in one.failed:
        yield "runs and agrees", one.failed[first], False
        return
    if wanted.copy_at_least is not None:
        series = one.beside(COPY)
        met = bool(series.reaches(1 / wanted.copy_at_least))
        yield f"≥ {wanted.copy_at_least:.2f} of copy", f"{1 / series.ratio:.3f}", met
    for name, at_most in wanted.time_at_most.items():
        goal = f"≤ {at_most:g} of {name}"
        if name in one.failed:
            yield goal, "untried", False
        else:
            series = one.beside(name)
            yield goal, f"{series.ratio:.3f}", bool(series.reaches(at_most))
    for name, at_most in wanted.memory_at_most.items():
        goal = f"≤ {at_most:g} of {name}'s peak memory"
        if name in one.failed:
            yield goal, "untried", False
        else:
            ratio = one.peak_bytes[first] / max(one.peak_bytes[name], 1)
            yield goal, f"{ratio:.3f}", ratio <= at_most


def line(one: Timed) -> str:
    """Return what came of some work, in one line."""
    ms = ", ".join(f"{name} {1e3 * statistics.median(s):.4g}" for name, s in one.seconds.items() if name != COPY)
    told = "; ".join(f"{goal}: {got}{'' if met else ' NO'}" for goal, got, met in goals(one))
    failed = "; ".join(f"{name}: {text}" for name, text in one.failed.items())
    return f"{one.name}, {one.size}: {ms} ms. {told} {failed}"


def tables_of(timed: Iterable[Timed], missing: dict[str, str]) -> list[Rows]:
    """Return every time, what did not run, and last, compact, the goals; `missing` is name -> why of whole work."""
    rows: list[list[str]] = []
    claims: list[list[str]] = []
    failed: dict[tuple[str, str], list[str]] = {("everybody", why): [name] for name, why in missing.items()}
    for one in timed:
        for name, text in one.failed.items():
            failed.setdefault((name, text), []).append(f"{one.name}, {one.size}")
        claims += [[one.name, one.size, goal, got, "yes" if met else "NO"] for goal, got, met in goals(one)]
        rows += [] if one.first in one.failed else rows_of(one)
    title = "Time of fds's kernel, and of the other (a copy: of the bytes that must move); the rest is of the other"
    tables: list[Rows] = [(title, HEADER, rows)]
    if failed:
        cells = [[name, _some(works), why] for (name, why), works in failed.items()]
        tables.append(("Not timed", ["contender", "work", "why"], cells))
    return [*tables, ("Goals", ["contender", "size", "goal", "got", "met"], claims)]


def rows_of(one: Timed) -> Iterator[list[str]]:
    """Yield the line of fds's own figures, and one for each that it is beside."""
    for name in one.seconds:
        if name == COPY and not one.moved_bytes:
            continue
        series = one.beside(name)
        ms, beside_ms = series.medians_ms()
        low, high = series.interval()
        ratio, interval = f"{series.ratio:.3f}", f"{low:.3f} to {high:.3f}"
        shown = f"{one.first} (A/A)" if name.endswith(AGAIN) else name
        if name == one.first:
            shown, ratio, interval = "itself", "", ""
        fraction = _of_copy(one, name)
        rate = "" if not one.flops or name == COPY else f"{one.flops / beside_ms / 1e9:.0f}"
        peak = "" if name == COPY else f"{one.peak_bytes[name] / 2**20:.0f}"
        host = "" if name == COPY else f"{one.host_us[name]:.0f}"
        yield [one.name, one.size, shown, f"{ms:.4g}", f"{beside_ms:.4g}", ratio, interval, fraction, rate, peak, host]


def _of_copy(one: Timed, name: str) -> str:
    """Return the bandwidth of a way over that of the copy, the median over rounds."""
    if not one.moved_bytes or name == COPY:
        return ""
    scale = one.moved_bytes / one.copied_bytes
    return f"{statistics.median(c * scale / s for c, s in zip(one.seconds[COPY], one.seconds[name], strict=True)):.3f}"


def _some(works: list[str]) -> str:
    return works[0] if len(works) == 1 else f"{works[0]}, and {len(works) - 1} more"
