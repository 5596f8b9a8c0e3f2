"""fds's kernels on a GPU, beside torch eager, torch.compile, what else is installed, and a copy of as many bytes.

    make bench-kernels                                    # within ten minutes, on an idle GPU
    make bench-kernels ARGS="--quick"                     # 5 rounds, nothing written: does it all run?
    make bench-kernels ARGS="--only norms,losses"         # of it
    make bench-kernels ARGS="--only layer_norm --rounds 40"

Goals: `Goals` in kernel_streams.py and kernel_products.py. Without a GPU nothing is timed: what the kernels take of
one, as compiled for it, is shown instead.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]  # as a module and as a file, from anywhere

import torch
import torch._dynamo.config
import torch._functorch.config
from rich.console import Console
from rich.markup import escape

from benchmarks import kernel_products as products, kernel_streams as streams, report
from benchmarks.kernel_layers import hugging_face
from benchmarks.kernel_timing import AGAIN, COPIED_BYTES, COPY, Clock, Timed
from benchmarks.kernel_works import Setting, Work
from benchmarks.report import Rows
from fds.kernels import language, only

FAMILIES: dict[str, Callable[[Setting], Iterator[Work]]] = {
    "updates": streams.updates,
    "norms": streams.norms,
    "elementwise": streams.elementwise,
    "losses": products.losses,
    "layer": products.transformer_layers,
    "columns": streams.columns,
    "attention": products.attentions,
    "softmax": products.softmaxes,
}
RECOMPILATIONS = 64  # of one function: a size each


def main() -> int:
    """Run from the command line; the exit code says whether the goals are met."""
    options, console = parse(), Console(width=180)
    if not torch.cuda.is_available():
        console.print("No GPU here, so nothing is timed and nothing written. What the kernels take of an sm_90:")
        return resources()
    tell = lambda text: console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
    timed, missing = measure(options, setting(), tell)
    if not timed and not missing:
        console.print(f"Nothing is called {', '.join(options.only)}.")
        return 2
    tables = tables_of(timed, missing)
    report.show_tables(literal(tables), console)
    if options.out and not missing:
        console.print(f"written: {report.write_tables(tables, options.name, facts(timed), folder=Path(options.out))}")
    return 0 if not missing and all(met for one in timed for *_, met in goals(one)) else 1


def setting() -> Setting:
    """Return where all runs."""
    return Setting(torch.device("cuda"))


def measure(
    options: argparse.Namespace, setting: Setting, tell: Callable[[str], None]
) -> tuple[list[Timed], list[str]]:
    """Return what was timed, and the names of what there was no time for."""
    started, clock = time.monotonic(), Clock(setting.device)
    timed, missing = [], []
    recompile = {"recompile_limit": RECOMPILATIONS, "accumulated_recompile_limit": 4 * RECOMPILATIONS}
    # a compiled backward may write over what it is given unless it is told that it runs more than once
    compiling = (torch._dynamo.config.patch(recompile), torch._functorch.config.patch(donated_buffer=False))
    with compiling[0], compiling[1], only("triton"):
        for work in works(setting, options.only):
            if time.monotonic() - started > options.seconds:
                missing.append(f"{work.name}, {work.size}")
                continue
            timed.append(clock.time(work, rounds=options.rounds))
            torch.cuda.empty_cache()
            tell(f"{time.monotonic() - started:5.0f} s  {line(timed[-1])}")
    return timed, missing


def works(setting: Setting, only: list[str]) -> Iterator[Work]:
    """Yield all work of the families, or of the names, that are asked for; what is not asked for is not made."""
    names = [name for name in only if name not in FAMILIES]
    for family, make in FAMILIES.items():
        whole = not only or family in only
        for work in make(setting) if whole or names else ():
            if whole or work.family.startswith(tuple(names)):
                yield work


def resources() -> int:
    """Print registers, spills and shared memory of every kernel, as compiled for a GPU that is not there."""
    cases = sorted(path.stem for path in (ROOT / "tests/kernels/cases").glob("*.py") if path.stem != "__init__")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.ahead_of_time"]  # one at a time: each shows as it is done
    return max(subprocess.run([*command, case], cwd=ROOT, env=environment).returncode for case in cases)


def goals(one: Timed) -> Iterator[tuple[str, str, bool]]:
    """Yield (goal, what came of it, whether it is met); where the interval reaches it, it is met."""
    wanted, first = one.work.goals, one.work.ways[0].name
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
            ratio = one.peak_bytes[first] / one.peak_bytes[name]
            yield goal, f"{ratio:.3f}", ratio <= at_most


def line(one: Timed) -> str:
    """Return what came of some work, in one line."""
    ms = ", ".join(f"{name} {1e3 * sorted(s)[len(s) // 2]:.4g}" for name, s in one.seconds.items() if name != COPY)
    told = "; ".join(f"{goal}: {got}{'' if met else ' NO'}" for goal, got, met in goals(one))
    failed = "; ".join(f"{name}: {text}" for name, text in one.failed.items())
    return f"{one.work.name}, {one.work.size}: {ms} ms. {told} {failed}"


def tables_of(timed: list[Timed], missing: list[str]) -> list[Rows]:
    """Return every time, what did not run, and last, compact, the goals."""
    rows, claims, failed = [], [], [["not begun", name, "no time left: --seconds"] for name in missing]
    for one in timed:
        first = one.work.ways[0].name
        failed += [[name, f"{one.work.name}, {one.work.size}", text] for name, text in one.failed.items()]
        claims += [[one.work.name, one.work.size, goal, got, "yes" if met else "NO"] for goal, got, met in goals(one)]
        if first in one.failed:
            continue
        for name in one.seconds:
            series = one.beside(name)
            if name == first or (name == COPY and not one.work.moved_bytes):
                continue
            ms, beside_ms = series.medians_ms()
            low, high = series.interval()
            fraction = f"{1 / series.ratio:.3f}" if name == COPY else ""
            peak = "" if name == COPY else f"{one.peak_bytes[name] / 2**20:.0f}"
            host = "" if name == COPY else f"{one.host_us[name]:.0f}"
            shown = f"{name} (A/A)" if name.endswith(AGAIN) else name
            rows.append(
                [
                    one.work.name,
                    one.work.size,
                    shown,
                    f"{ms:.4g}",
                    f"{beside_ms:.4g}",
                    f"{series.ratio:.3f}",
                    f"{low:.3f} to {high:.3f}",
                    fraction,
                    peak,
                    host,
                ]
            )
    header = ["contender", "size", "other", "ms", "its ms", "ratio", "95% interval", "of copy", "peak MiB", "host us"]
    title = "Time of fds's kernel, and of the other (a copy: of the bytes that must move); memory and host of the other"
    tables: list[Rows] = [(title, header, rows)]
    if failed:
        tables.append(("Not timed", ["contender", "work", "why"], failed))
    return [*tables, ("Goals", ["contender", "size", "goal", "got", "met"], claims)]


def literal(tables: list[Rows]) -> list[Rows]:
    """Return tables whose cells rich prints as they are: a peer's error may hold a path in brackets."""
    return [(title, header, [[escape(cell) for cell in row] for row in rows]) for title, header, rows in tables]


def facts(timed: list[Timed]) -> dict[str, str]:
    """Return what ran, for the file."""
    copies = [s for one in timed for s in one.seconds[COPY]]
    rounds = len(next(iter(timed[0].seconds.values())))
    speed = COPIED_BYTES / sorted(copies)[len(copies) // 2] / 1e12
    return {
        "what ran": f"{rounds} rounds, in each all contenders of some work and a copy of 1 GiB, in turned order; "
        "fresh inputs in turn, so that none is in the second-level cache; times of the device, launches hidden by a "
        "wait, but for the transformer layer, which is called again and again as in a model",
        "copy": f"{speed:.2f} TB/s read and written, the median of all rounds",
        "agreement": "each contender's results and gradients against float64 (float32 around products), dropout off; "
        "with dropout fds's against its reference in plain torch",
        "layer": "eager is plain torch" if hugging_face(16, 2, 0.0) is None else "eager is Hugging Face's BertLayer",
        "triton": language.triton.__version__,
    }


def parse() -> argparse.Namespace:
    """Return the options."""
    split = lambda text: [word.strip() for word in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="each of every contender (%(default)s)")
    parser.add_argument("--only", type=split, default=[], help=f"of {', '.join(FAMILIES)}, or how a name begins (all)")
    parser.add_argument("--seconds", type=float, default=540, help="after which nothing more is begun (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="5 rounds, nothing written")
    parser.add_argument("--out", help="where the table goes (benchmarks/results, if all is measured)")
    parser.add_argument("--name", default="kernels", help="in the name of the table (%(default)s)")
    options = parser.parse_args()
    options.rounds = min(options.rounds, 5) if options.quick else options.rounds
    options.out = options.out or (None if options.quick or options.only else str(report.RESULTS))
    return options


if __name__ == "__main__":
    sys.exit(main())
