"""What whole training steps come to: tables and goals, made from records at any time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks import report
from benchmarks.goals import CAPTURED_BESIDE_COMPILED, PEAK_FLOPS, STEP_BESIDE_COMPILED
from benchmarks.gpu.records import FAILED, PASSED, Record
from benchmarks.gpu.step_contenders import CAPTURED, COMPILED, EAGER
from benchmarks.harness import Series
from benchmarks.report import Rows

Figures = Mapping[str, Any]
CAPTURED_ROWS = 8  # at which the goal of captured steps is


def tables(records: list[Record]) -> list[Rows]:
    """Return times, memory and launches, what each does, what did not run, and last the goals."""
    passed = [r.figures for r in records if r.status in (PASSED, FAILED) and "contender" in r.figures]
    timed = [f for f in passed if "seconds" in f]
    alone = [f for f in passed if "losses" in f]
    small = [pair for r in records for pair in r.figures.get("pairs", ())]
    product = next((r.figures["flops"] for r in records if "flops" in r.figures), None)
    losses = {(f["contender"], f["rows"]): f["losses"] for f in alone}
    what = {f["contender"]: f["what"] for f in passed}
    failed = [[r.case, r.error.strip().split("\n")[-1] or "no time left"] for r in records if r.status != PASSED]
    peak = f"{PEAK_FLOPS / 1e12:.0f} TFLOP/s" + (f"; a matrix product reached {product / 1e12:.0f}" if product else "")
    made = [
        (f"A step (MFU: 6 N + 12 layers W T operations a token, of {peak})", TIME_HEADER, [*times(timed, product)]),
        ("Alone in a process", ALONE_HEADER, [memory_of(f, losses) for f in alone]),
        ("The example's GPT in float32, a small one", EXAMPLE_HEADER, [example_of(f) for f in small]),
        ("What each does", ["contender", "what"], [[name, text] for name, text in what.items()]),
        ("Not run, or not as the others", ["contender", "why"], failed),
    ]
    return [*(table for table in made if table[2]), ("Goals", ["contender", "goal", "got", "met"], [*goals(timed)])]


TIME_HEADER = ["contender", "batch", "ms", "tokens/s", "MFU", "of a product", "other", "ratio", "95% interval"]
TIME_HEADER += ["host us", "CPU us"]
ALONE_HEADER = ["contender", "batch", "peak MiB", "reserved MiB", "held MiB", "kernels", "launches", "operators"]
ALONE_HEADER += ["first loss", "last", "from eager's", "first steps s"]
EXAMPLE_HEADER = ["contender", "other", "ms", "its ms", "ratio", "95% interval", "agree", "peak over its peak"]


def series_of(figures: Figures) -> Series:
    """Return the pairs of a contender and of the one beside it."""
    return Series(tuple(figures["seconds"]), tuple(figures["beside_seconds"]))


def times(timed: Iterable[Figures], product: float | None) -> Iterator[list[str]]:
    """Yield a line for each contender and batch; of a product: of the operations in a second of a matrix product."""
    for f in timed:
        series = series_of(f)
        (ms, _), (low, high) = series.medians_ms(), series.interval()
        tokens = f["tokens"] / ms * 1e3
        flops = tokens * f["flops_per_token"]
        yield [
            f["contender"],
            batch_of(f),
            f"{ms:.4g}",
            f"{tokens:,.0f}",
            f"{flops / PEAK_FLOPS:.3f}",
            f"{flops / product:.3f}" if product else "",
            f"{f['beside']} (A/A)" if f["beside"] == f["contender"] else f["beside"],
            f"{series.ratio:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{f['host_us']:.0f}",
            f"{f['cpu_us']:.0f}",
        ]


def example_of(f: Figures) -> list[str]:
    """Return the line of one comparison of the example's steps."""
    other = f"{f['beside']} (A/A)" if f["beside"] == f["contender"] else f["beside"]
    return [f["contender"], other, *report.timed(series_of(f)), f["agree"], f"{f['memory']:.3f}"]


def memory_of(f: Figures, losses: Mapping[tuple[str, int], list[float]]) -> list[str]:
    """Return the line of one contender that ran alone; launches are a GPU's, operators torch's, nested ones too."""
    mib = lambda name: f"{f[name] / 2**20:.0f}" if name in f else ""
    eager = losses.get((EAGER, f["rows"]))
    apart = max(abs(a - b) / abs(b) for a, b in zip(f["losses"], eager, strict=True)) if eager else None
    counts = [str(f[name]) for name in ("kernels", "launches", "operators")]
    ends = [f"{f['losses'][0]:.4f}", f"{f['losses'][-1]:.4f}", "" if apart is None else f"{apart:.1e}"]
    sizes = [mib(name) for name in ("peak_bytes", "reserved_bytes", "held_bytes")]
    return [f["contender"], batch_of(f), *sizes, *counts, *ends, f"{f['first steps, s']:.1f}"]


def batch_of(f: Figures) -> str:
    """Return the batch of a record in words."""
    return f"{f['rows']} x {f['tokens'] // f['rows']}" if "tokens" in f else f"{f['rows']}"


def goals(timed: Iterable[Figures]) -> Iterator[list[str]]:
    """Yield the goals, which are of the fastest of fds's beside the compiled loop, and of the captured at batch 8."""
    beside = [f for f in timed if f["beside"] == COMPILED and f["contender"].startswith("fds")]
    for rows in sorted({f["rows"] for f in beside}):
        here = [f for f in beside if f["rows"] == rows]
        yield goal(here, "the fastest of fds's", STEP_BESIDE_COMPILED)
        captured = [f for f in here if f["contender"] in CAPTURED]
        if rows == CAPTURED_ROWS:
            yield goal(captured, "captured", CAPTURED_BESIDE_COMPILED)


def goal(candidates: list[Figures], who: str, at_most: float) -> list[str]:
    """Return the line of a goal."""
    claim = f"{who}: ≤ {at_most:g} of {COMPILED}'s time"
    if not candidates:
        return [who, claim, "untried", "NO"]
    best = min(candidates, key=lambda f: series_of(f).ratio)
    series = series_of(best)
    name = f"{best['contender']}, {batch_of(best)}"
    return [name, claim, f"{series.ratio:.3f}", "yes" if series.reaches(at_most) else "NO"]
