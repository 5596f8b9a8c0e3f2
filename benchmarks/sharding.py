"""Sharded training with fds beside PyTorch's DDP and FSDP2 and DeepSpeed's ZeRO: two gloo ranks of one thread each.

    make bench-sharding                                            # about two hours, quiet
    make bench-sharding ARGS="--cases 25M --accumulate 4 --speed"  # a case of its own: 20 minutes
    make bench-sharding ARGS="--only DDP,FSDP2 --rounds 4"         # these alone, a short look
    make bench-sharding ARGS="--buckets --rates 1gbit --cases 5M"  # sizes of buckets over a cable (root, iproute2)

Claims: CLAIMS below, of time; less resident memory at its peak than every peer's at the same stage; and buckets that
follow the model, over the loopback and over cables, beside DDP's and beside buckets of every fixed size.
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

import attrs
import torch
from rich.console import Console

from benchmarks import cable, ranks, report
from benchmarks.harness import PAIRS_PER_MAKING, Series
from benchmarks.ranks import Resident
from benchmarks.report import Rows
from benchmarks.sharding_contenders import AGAIN, CONTENDERS, GPT, Case, compete, reside, sized

SMALL = [Case("5M", width=256, layers=6, rows=4, context=128), Case("25M", width=512, layers=8, rows=4, context=128)]
BOUND = Case("57M", width=768, layers=8, rows=1, context=64)  # by communication
TINY = Case("tiny", width=64, layers=1, rows=1, context=8)
MEMORY_CALLS = 8
LOOPBACK, CABLES = "loopback", ("1gbit", "200mbit")
SIZES = {"tiny": (1,), "5M": (1, 2, 4, 8, 32), "25M": (2, 4, 8, 16, 32), "57M": (8, 16, 32)}  # MiB, by case
SLOW = {("25M", "200mbit"): 8, ("57M", "1gbit"): 10, ("57M", "200mbit"): 4}  # rounds at most, of steps of seconds

# who stands beside whom, by stage, and the ratio of times claimed; what stands together runs in the same processes
CLAIMS = {
    0: {("fds 0", "DDP"): 1.00},
    1: {("fds 1", "DeepSpeed 1"): 0.85, ("fds 1", "FSDP2 1"): 0.85},
    2: {("fds 2", "DeepSpeed 2"): 0.85, ("fds 2", "FSDP2 2"): 0.85, ("fds 2 pure", "fds 2"): None},
    3: {("fds 3", "DeepSpeed 3"): 0.85, ("fds 3", "FSDP2 3"): 0.85},
}
CLAIMS_BOUND = {
    2: {
        ("fds 2", "FSDP2 2"): 0.70,
        ("fds 2", "DeepSpeed 2"): 0.55,
        ("fds 2", "DDP"): 1.10,
        ("fds 2 pure", "fds 2"): None,
    },
    3: {("fds 3", "FSDP2 3"): 0.70, ("fds 3", "DeepSpeed 3"): 0.70},
}
PEERS = {0: ["DDP"], **{stage: [f"FSDP2 {stage}", f"DeepSpeed {stage}"] for stage in (1, 2, 3)}}


@attrs.frozen
class Timed:
    """What ran together: the seconds of each contender, round by round."""

    case: Case
    claims: dict[tuple[str, str], float | None]
    itself: str  # who ran a second time
    seconds: dict[str, tuple[float, ...]]
    apart: float  # the largest relative difference of the losses of two contenders

    def rows(self) -> Iterator[tuple[str, str, Series, float | None]]:
        """Yield (contender, beside, series, claim), the A/A last."""
        pairs = [*self.claims.items(), ((self.itself + AGAIN, self.itself), None)]
        for (one, other), at_most in pairs:
            if one in self.seconds and other in self.seconds:
                yield one, other, Series(self.seconds[one], self.seconds[other]), at_most


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    options = parse()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # and with it the ranks
    ranks.prepare(["benchmarks.sharding_contenders", "deepspeed"])
    console, tables, met = Console(), [], True
    tell = lambda text: console.print(f"[dim]{text}[/]", highlight=False, soft_wrap=True)
    if options.speed:
        timed = [one for case in options.cases for one in time_case(case, options, tell)]
        tables += tables_of_time(timed)
        met &= all(series.reaches(at_most) is not False for one in timed for *_, series, at_most in one.rows())
    if options.buckets:
        timed = [one for case in wired(options, tell) for one in time_case(case, options, tell)]
        tables += tables_of_time(timed, "Buckets that follow the model beside those of a fixed size")
        met &= all(series.reaches(at_most) is not False for one in timed for *_, series, at_most in one.rows())
    if options.memory:
        held = {case: memory_of(case, options, tell) for case in options.cases}
        tables += tables_of_memory(held)
        met &= all(ours.peak_bytes < theirs.peak_bytes for some in held.values() for *_, ours, theirs in below(some))
    report.show_tables(tables, console)
    if options.out:
        path = report.write_tables(tables, options.name, facts(options.cases), folder=Path(options.out))
        console.print(f"written: {path}")
    return 0 if met or options.quick else 1  # a tiny model is all overhead, and claims nothing


def wired(options: argparse.Namespace, tell) -> list[Case]:
    """Return the cases, each over the loopback and over every cable; without cables where there can be none."""
    rates, why = options.rates, cable.missing()
    if why:
        tell(f"no cable here ({why}): only over the loopback")
        rates = [rate for rate in rates if rate == LOOPBACK]
    cases = {case.name: attrs.evolve(case, accumulate=1) for case in options.cases}
    return [attrs.evolve(case, rate=rate) for rate in rates for case in cases.values()]


def time_case(case: Case, options: argparse.Namespace, tell) -> Iterator[Timed]:
    """Yield each stage of a case, timed. Raises `AssertionError` where contenders do not do the same work."""
    for stage, claims in claims_of(case).items():
        names = [name for name in dict.fromkeys(n for pair in claims for n in pair) if wanted(name, options)]
        if not names:
            continue
        names.append(names[0] + AGAIN)
        if options.stages and stage not in options.stages:
            continue
        seconds: dict[str, list[float]] = {name: [] for name in names}
        apart, most = 0.0, min(options.rounds, SLOW.get((case.name, case.rate), options.rounds))
        first_calls, over = (2, case.rate.replace(LOOPBACK, "")) if case.rate else (5, "")
        for turn in range(0, most, PAIRS_PER_MAKING):  # then all are made anew, in fresh processes
            rounds = min(PAIRS_PER_MAKING, most - turn)
            turns, _ = ranks.launch(compete, case, tuple(names), rounds, 2 if turn else first_calls, turn, over=over)
            apart = max(apart, distance(turns.losses))
            assert apart <= 1e-3, f"{case}, stage {stage}: the losses do not agree: {turns.losses}"
            for name in names:
                seconds[name] += turns.seconds[name]
        tell(
            f"{case}, stage {stage}: "
            + ", ".join(f"{n} {1e3 * statistics.median(s):.0f}" for n, s in seconds.items())
            + f" ms, losses to {apart:.1g}"
        )
        yield Timed(case, claims, names[0], {n: tuple(s) for n, s in seconds.items()}, apart)


def claims_of(case: Case) -> dict[int, dict[tuple[str, str], float | None]]:
    """Return who stands beside whom, by stage: where the case says over what, buckets that follow the model."""
    if not case.rate:
        return CLAIMS_BOUND if case.name == BOUND.name else CLAIMS
    fixed = {s: {(f"fds {s}", sized(s, mib)): 1.03 for mib in SIZES[case.name]} for s in (0, 1, 2)}
    return {**fixed, 0: {("fds 0", "DDP"): 0.95, **fixed[0]}}


def memory_of(case: Case, options: argparse.Namespace, tell) -> dict[str, Resident]:
    """Return what each contender holds, each in a pair of processes of its own."""
    held = {}
    for name in CONTENDERS:
        if wanted(name, options):
            held[name], _ = ranks.launch(reside, case, name, MEMORY_CALLS)
            tell(
                f"{case}: {name} holds {held[name].peak_bytes / 1e6:.0f} MB, "
                f"{held[name].stepping_bytes / 1e6:.0f} while stepping"
            )
    return held


def below(held: dict[str, Resident]) -> Iterator[tuple[str, str, Resident, Resident]]:
    """Yield (contender, beside, its memory, the other's): ours beside every peer at its stage."""
    for stage, peers in PEERS.items():
        for peer in peers:
            if (mine := f"fds {stage}") in held and peer in held:
                yield mine, peer, held[mine], held[peer]


def distance(losses: dict[str, list[float]]) -> float:
    """Return how far the losses of any two contenders are apart, over the smaller one."""
    return max((max(values) - min(values)) / abs(min(values)) for values in zip(*losses.values(), strict=True))


def tables_of_time(timed: list[Timed], title: str = "Time") -> list[Rows]:
    """Return the ratios, and the median of every contender."""
    rows, medians = [], []
    for one in timed:
        rows += [
            [
                contender,
                str(one.case),
                beside + (" (A/A)" if contender.endswith(AGAIN) else ""),
                str(len(series.ratios)),
                *report.timed(series),
                report.verdict(at_most, series.reaches(at_most)),
            ]
            for contender, beside, series, at_most in one.rows()
        ]
        medians += [
            [name, str(one.case), f"{1e3 * statistics.median(s):.4g}", f"{1e3 * min(s):.4g}", f"{one.apart:.1g}"]
            for name, s in one.seconds.items()
        ]
    return [
        (title, ["contender", "case", "beside", "rounds", "ms", "ms beside", "ratio", "95% interval", "claim"], rows),
        ("A step (ms of the slowest rank)", ["contender", "case", "median", "least", "losses apart"], medians),
    ]


def tables_of_memory(held: dict[Case, dict[str, Resident]]) -> list[Rows]:
    """Return ours beside every peer, and what each holds."""
    mb = lambda count: f"{count / 1e6:.0f}"
    pairs = [
        [
            mine,
            str(case),
            peer,
            mb(ours.peak_bytes),
            mb(theirs.peak_bytes),
            f"{ours.peak_bytes / theirs.peak_bytes:.3f}",
            report.verdict(1, ours.peak_bytes < theirs.peak_bytes),
        ]
        for case, some in held.items()
        for mine, peer, ours, theirs in below(some)
    ]
    alone = [
        [name, str(case), mb(one.peak_bytes), mb(one.stepping_bytes)]
        for case, some in held.items()
        for name, one in some.items()
    ]
    return [
        (
            "Resident memory at its peak (MB a rank, above what it was before the model)",
            ["contender", "case", "beside", "MB", "MB beside", "ratio", "claim"],
            pairs,
        ),
        (
            f"Resident memory of each ({MEMORY_CALLS} steps; stepping: without the making and the first 2)",
            ["contender", "case", "peak MB", "stepping MB"],
            alone,
        ),
    ]


def facts(cases: list[Case]) -> dict[str, str]:
    """Return what ran, for the file."""
    with torch.device("meta"):
        sizes = {case.name: sum(p.numel() for p in GPT(case).parameters()) for case in cases}
    try:
        deepspeed = version("deepspeed")
    except PackageNotFoundError:
        deepspeed = "missing"
    return {
        "what ran": "one training step of a GPT, float32, on 2 gloo ranks of one thread each; a case says its "
        "parameters and, for each rank, microbatches x rows x tokens",
        "models": ", ".join(
            f"{name} has {size:,} parameters (width {case.width}, {case.layers} layers)"
            for (name, size), case in zip(sizes.items(), {c.name: c for c in cases}.values(), strict=True)
        ),
        "all": "AdamW (torch's, fused; fds's own) with lr 3e-4, betas (0.9, 0.999), eps 1e-8, weight decay 0.01; "
        "no clipping",
        "DDP": "its default buckets; no_sync() but for the last microbatch",
        "FSDP2": "fully_shard of every block and of the root; reshard_after_forward=False as 1 and 2, True as 3; "
        "1 reduces once a step (set_requires_gradient_sync), 2 and 3 every microbatch",
        "DeepSpeed": f"{deepspeed}, ZeRO stage 1, 2, 3; gloo; buckets of 5,000,000 elements; gradient_clipping 0 "
        "(its default is 1); at stage 3 without memory_efficient_linear, which replaces F.linear for all",
    }


def wanted(name: str, options: argparse.Namespace) -> bool:
    """Tell whether `--only` names this contender, or the first words of its name."""
    return not options.only or any(f"{name} ".startswith(f"{one} ") for one in options.only)


def parse() -> argparse.Namespace:
    """Return the options, `cases` as a list of `Case`."""
    words = lambda text: [word.strip() for word in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=words, help="of 5M, 25M, 57M (all; 25M with 4 microbatches only if asked for)")
    parser.add_argument("--accumulate", type=words, help="microbatches a step of 5M and 25M (1,4)")
    parser.add_argument("--rounds", type=int, default=20, help="each a step of every contender (%(default)s)")
    parser.add_argument("--only", type=words, default=[], help="these contenders, or those whose names begin so")
    parser.add_argument("--speed", action="store_true", help="only measure time")
    parser.add_argument("--memory", action="store_true", help="only measure memory")
    parser.add_argument("--buckets", action="store_true", help="only time sizes of buckets")
    parser.add_argument("--rates", type=words, default=[LOOPBACK, *CABLES], help="of cables (loopback,1gbit,200mbit)")
    parser.add_argument("--stages", type=words, default=[], help="of what is timed (all)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds, nothing written")
    parser.add_argument("--out", help="where the table goes (benchmarks/results; nowhere with --only and --quick)")
    parser.add_argument("--name", default="sharding", help="in the name of the table (%(default)s)")
    options = parser.parse_args()
    everything = not options.cases and not options.accumulate
    names, counts = options.cases or ["5M", "25M", "57M"], [int(n) for n in options.accumulate or ["1", "4"]]
    cases = [attrs.evolve(case, accumulate=n) for case in SMALL if case.name in names for n in counts]
    if everything:
        cases.remove(attrs.evolve(SMALL[1], accumulate=4))
    options.cases = [*cases, *([BOUND] if BOUND.name in names else [])]
    if options.quick:
        options.cases, options.rounds = [TINY], min(options.rounds, 2)
    if not options.speed and not options.memory and not options.buckets:
        options.speed = options.memory = options.buckets = True
    options.stages = [int(stage) for stage in options.stages]
    options.out = options.out or (None if options.only or options.quick else str(report.RESULTS))
    if not options.cases or options.rounds < 1:
        parser.error("nothing to do")
    return options


if __name__ == "__main__":
    sys.exit(main())
