"""How long it takes to plan a large pipeline: schedule, lower, validate, simulate.

    python -m benchmarks.planning             # 64 stages, 512 microbatches
    python -m benchmarks.planning --keep      # and write the table to benchmarks/results
    python -m benchmarks.planning --quick     # 4 stages, 8 microbatches: does it all run?

Claim: all of it takes less than ten seconds for each schedule. Every phase is timed `--repeats` times, each time from
a new plan; the table shows the median.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # as a module and as a file, from anywhere

from rich.console import Console

from benchmarks import report
from fds.plans.lowering import assign_buffers, communicate, finish, overlap
from fds.plans.plan import PipelineSchedule, Plan
from fds.plans.schedules import dualpipe_v, gpipe, interleaved, one_f_one_b, zb_h1, zb_h2, zb_v
from fds.plans.simulator import simulate
from fds.plans.validation import validate

AT_MOST = 10.0  # seconds
SCHEDULES: dict[str, tuple[PipelineSchedule, int]] = {  # and how many stages a rank has
    "gpipe": (gpipe, 1),
    "one_f_one_b": (one_f_one_b, 1),
    "interleaved(2)": (interleaved(2), 2),
    "zb_h1": (zb_h1, 1),
    "zb_h2": (zb_h2, 1),
    "zb_v": (zb_v, 2),
    "dualpipe_v": (dualpipe_v, 2),
}
PASSES: dict[str, Callable[[Plan], object]] = {
    "lower": lambda plan: finish(overlap(assign_buffers(communicate(plan)))),
    "validate": validate,
    "simulate": simulate,
}
T = TypeVar("T")


def main() -> int:
    """Run from the command line; the exit code says whether the claim is met."""
    options = parse()
    console, rows, met = Console(), [], True
    for name, (schedule, per_rank) in SCHEDULES.items():
        runs = [once(schedule, options.stages // per_rank, options.microbatches) for _ in range(options.repeats)]
        actions = runs[0][0]
        phases = [statistics.median(seconds[phase] for _, seconds in runs) for phase in ("plan", *PASSES)]
        total = statistics.median(sum(seconds.values()) for _, seconds in runs)
        met &= total < AT_MOST
        rows.append([name, f"{actions:,}", *(f"{x:.2f}" for x in (*phases, total)), verdict(total)])
    header = ["contender", "actions", "plan", *PASSES, "total", "claim"]
    title = f"Seconds for {options.stages} stages x {options.microbatches} microbatches (median of {options.repeats})"
    tables: list[report.Rows] = [(title, header, rows)]
    report.show_tables(tables, console)
    if options.keep:
        facts = {
            "what ran": "each schedule's plan, lowered (communicate, assign_buffers, overlap, finish), checked "
            "(validate) and simulated at unit costs; actions are the lowered plan's"
        }
        console.print(f"written: {report.write_tables(tables, 'planning', facts)}")
    return 0 if met else 1


def once(schedule: PipelineSchedule, num_ranks: int, num_microbatches: int) -> tuple[int, dict[str, float]]:
    """Return the number of actions, and the seconds of each phase."""
    seconds: dict[str, float] = {}
    plan = timed(seconds, "plan", lambda: Plan.of(schedule(num_ranks, num_microbatches)))
    for name, apply in PASSES.items():
        result = timed(seconds, name, lambda apply=apply, plan=plan: apply(plan))
        plan = result if isinstance(result, Plan) else plan
    return sum(map(len, plan.rows)), seconds


def timed(seconds: dict[str, float], name: str, call: Callable[[], T]) -> T:
    """Note how long a call takes, and return what it returns."""
    start = time.perf_counter()
    result = call()
    seconds[name] = time.perf_counter() - start
    return result


def verdict(total: float) -> str:
    """Return the cell of the claim."""
    return f"< {AT_MOST:g} s: {'yes' if total < AT_MOST else 'NO'}"


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=64, help="of all ranks together; even (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=512, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of every phase (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="write the table to benchmarks/results")
    parser.add_argument("--quick", action="store_true", help="4 stages, 8 microbatches, once")
    options = parser.parse_args()
    if options.quick:
        options.stages, options.microbatches, options.repeats = 4, 8, 1
    return options


if __name__ == "__main__":
    sys.exit(main())
