"""Pipelines with fds beside DeepSpeed's engine and PyTorch's schedule: two gloo ranks of one thread each.

    make bench-pipeline                                              # about a quarter of an hour, quiet
    make bench-pipeline ARGS="--only DeepSpeed,torch --rounds 4"     # these alone, a short look; nothing written
    make bench-pipeline ARGS="--memory"

Claims: CLAIMS below, of time; and at its peak no more resident memory than either peer.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]  # as a module and as a file, from anywhere

import torch
from rich.console import Console

from benchmarks import ranks, report
from benchmarks.harness import PAIRS_PER_MAKING
from benchmarks.pipeline_contenders import AGAIN, CONTENDERS, Case, boundaries, compete, layers, reside
from benchmarks.ranks import Resident
from benchmarks.report import Rows
from benchmarks.sharding import Timed, distance, tables_of_time, wanted

CASES = [
    Case("small", width=256, layers=8, rows=4, context=128, accumulate=8),
    Case("wide", width=512, layers=8, rows=4, context=128, accumulate=8),
]
TINY = Case("tiny", width=64, layers=8, rows=1, context=8, accumulate=4)
MEMORY_CALLS, MEMORY_RUNS = 8, 3
LOSSES_APART = 1e-4  # at most, relative

# who stands beside whom, and the ratio of times claimed (None: it only informs); all run in the same processes
CLAIMS: dict[tuple[str, str], float | None] = {
    ("fds 1F1B", "DeepSpeed"): 0.95,
    ("fds 1F1B", "torch 1F1B"): 0.95,
    ("fds ZB-H1", "fds 1F1B"): 1.00,
    ("fds ZB-H1", "DeepSpeed"): None,
    ("fds ZB-H1", "torch 1F1B"): None,
    ("fds ZB-H2", "fds 1F1B"): None,
    ("fds GPipe", "fds 1F1B"): None,
    ("fds 1F1B pure", "fds 1F1B"): None,
}
# the same of resident memory: the schedules that hold as many microbatches as the peers' do
MEMORY_CLAIMS: dict[tuple[str, str], float | None] = {
    ("fds 1F1B", "DeepSpeed"): 1.00,
    ("fds 1F1B", "torch 1F1B"): 1.00,
    ("fds ZB-H1", "DeepSpeed"): None,
    ("fds ZB-H1", "torch 1F1B"): None,
}


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    options = parse()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # and with it the ranks
    ranks.prepare(["benchmarks.pipeline_contenders", "deepspeed.pipe"])
    console, tables, met = Console(), [], True
    tell = lambda text: console.print(f"[dim]{text}[/]", highlight=False, soft_wrap=True)
    if options.speed:
        timed = [time_case(case, options, tell) for case in options.cases]
        tables += tables_of_time(timed)
        met &= all(series.reaches(at_most) is not False for one in timed for *_, series, at_most in one.rows())
    if options.memory:
        held = {case: memory_of(case, options, tell) for case in options.cases}
        tables += tables_of_memory(held)
        met &= all(fits is not False for some in held.values() for *_, fits in compared(some))
    report.show_tables(tables, console)
    if options.out:
        path = report.write_tables(tables, options.name, facts(options.cases), folder=Path(options.out))
        console.print(f"written: {path}")
    return 0 if met or options.quick else 1  # a tiny model is all overhead, and claims nothing


def time_case(case: Case, options: argparse.Namespace, tell) -> Timed:
    """Return a case, timed. Raises `RuntimeError` where contenders do not do the same work."""
    names = [name for name in dict.fromkeys(n for pair in CLAIMS for n in pair) if wanted(name, options)]
    names.append(names[0] + AGAIN)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    apart = 0.0
    for turn in range(0, options.rounds, PAIRS_PER_MAKING):  # then all are made anew, in fresh processes
        rounds = min(PAIRS_PER_MAKING, options.rounds - turn)
        turns, _ = ranks.launch(compete, case, tuple(names), rounds, 2 if turn else 5, turn)
        apart = max(apart, distance(turns.losses))
        if not apart <= LOSSES_APART:  # also where it is NaN
            raise RuntimeError(f"{case}: the losses do not agree: {turns.losses}")
        for name in names:
            seconds[name] += turns.seconds[name]
    tell(
        f"{case}: "
        + ", ".join(f"{n} {1e3 * statistics.median(s):.0f}" for n, s in seconds.items())
        + f" ms, losses to {apart:.1g}"
    )
    return Timed(case, CLAIMS, names[0], {n: tuple(s) for n, s in seconds.items()}, apart)


def memory_of(case: Case, options: argparse.Namespace, tell) -> dict[str, list[Resident]]:
    """Return what each contender holds, each time in a pair of processes of its own, the least first.

    The peak depends on whether a message arrives before a product ends: that of one contender strayed by 4% here.
    """
    held = {}
    for name in CONTENDERS:
        if wanted(name, options):
            runs = [ranks.launch(reside, case, name, MEMORY_CALLS)[0] for _ in range(MEMORY_RUNS)]
            held[name] = sorted(runs, key=lambda one: one.peak_bytes)
            tell(f"{case}: {name} holds " + ", ".join(f"{one.peak_bytes / 1e6:.0f}" for one in held[name]) + " MB")
    return held


def peak(runs: list[Resident]) -> float:
    """Return the median of the peaks, in bytes."""
    return statistics.median(one.peak_bytes for one in runs)


def compared(held: dict[str, list[Resident]]) -> Iterator[tuple[str, str, float, float | None, bool | None]]:
    """Yield (contender, beside, ratio of peaks, claim, whether it is met), of those that ran."""
    for (one, other), at_most in MEMORY_CLAIMS.items():
        if one in held and other in held and peak(held[other]):  # the smallest case may fit into what a process has
            ratio = peak(held[one]) / peak(held[other])
            yield one, other, ratio, at_most, None if at_most is None else ratio <= at_most


def tables_of_memory(held: dict[Case, dict[str, list[Resident]]]) -> list[Rows]:
    """Return ours beside the peers, and what each holds."""
    mb = lambda count: f"{count / 1e6:.0f}"
    pairs = [
        [
            one,
            str(case),
            other,
            mb(peak(some[one])),
            mb(peak(some[other])),
            f"{ratio:.3f}",
            report.verdict(at_most, met),
        ]
        for case, some in held.items()
        for one, other, ratio, at_most, met in compared(some)
    ]
    alone = [
        [
            name,
            str(case),
            mb(peak(runs)),
            f"{mb(runs[0].peak_bytes)} to {mb(runs[-1].peak_bytes)}",
            mb(statistics.median(one.stepping_bytes for one in runs)),
        ]
        for case, some in held.items()
        for name, runs in some.items()
    ]
    return [
        (
            "Resident memory at its peak (MB of the rank that holds most, above what it was before the layers)",
            ["contender", "case", "beside", "MB", "MB beside", "ratio", "claim"],
            pairs,
        ),
        (
            f"Resident memory of each (median of {MEMORY_RUNS} runs of {MEMORY_CALLS} steps; stepping: without the "
            "making and the first 2)",
            ["contender", "case", "peak MB", "runs", "stepping MB"],
            alone,
        ),
    ]


def facts(cases: list[Case]) -> dict[str, str]:
    """Return what ran, for the file."""
    with torch.device("meta"):
        sizes = {
            case: [sum(p.numel() for p in cls(*args).parameters()) for cls, *args in layers(case)] for case in cases
        }
    try:
        deepspeed = version("deepspeed")
    except PackageNotFoundError:
        deepspeed = "missing"
    split = lambda case: zip(boundaries(case), boundaries(case)[1:], strict=False)
    return {
        "what ran": "one training step of a GPT, float32, as a pipeline of 2 stages on 2 gloo ranks of one thread "
        "each; a case says microbatches x rows x tokens of a step",
        "models": "; ".join(
            f"{case.name}: width {case.width}, {case.layers} blocks between an embedding and a head of its own, stages "
            + " and ".join(f"[{start}, {end}) of {sum(counts[start:end]):,} parameters" for start, end in split(case))
            for case, counts in sizes.items()
        ),
        "all": "AdamW (torch's, fused; fds's own) with lr 3e-4, betas (0.9, 0.999), eps 1e-8, weight decay 0.01; "
        "no clipping, no recomputation; the mean loss on both ranks after every step",
        "DeepSpeed": f"{deepspeed}, PipelineModule of LayerSpecs, 'uniform'; PipelineEngine.train_batch; gloo, ZeRO "
        "stage 0, gradient_clipping 0, no printing, no timers",
        "torch 1F1B": "Schedule1F1B of a PipelineStage; the loss divided by the microbatches (scale_grads=False), "
        "return_outputs=False, zero_grad(set_to_none=True), the loss broadcast",
    }


def parse() -> argparse.Namespace:
    """Return the options, `cases` as a list of `Case`."""
    words = lambda text: [word.strip() for word in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=words, default=["small"], help="of small, wide (small)")
    parser.add_argument("--rounds", type=int, default=20, help="each a step of every contender (%(default)s)")
    parser.add_argument("--only", type=words, default=[], help="these contenders, or those whose names begin so")
    parser.add_argument("--speed", action="store_true", help="only measure time")
    parser.add_argument("--memory", action="store_true", help="only measure memory")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds, nothing written")
    parser.add_argument("--out", help="where the table goes (benchmarks/results; nowhere with --only and --quick)")
    parser.add_argument("--name", help="in the name of the table (pipeline-<cases>)")
    options = parser.parse_args()
    options.name = options.name or "-".join(["pipeline", *options.cases])
    options.cases = [case for case in CASES if case.name in options.cases]
    if options.quick:
        options.cases, options.rounds = [TINY], min(options.rounds, 2)
    if not options.speed and not options.memory:
        options.speed = options.memory = True
    options.out = options.out or (None if options.only or options.quick else str(report.RESULTS))
    if not options.cases or options.rounds < 1 or not any(wanted(name, options) for name in CONTENDERS):
        parser.error("nothing to do")
    return options


if __name__ == "__main__":
    sys.exit(main())
