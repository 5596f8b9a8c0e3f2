"""Messages in fewer bytes over a cable that shows what a byte costs: two gloo ranks in network namespaces of their own.

    make bench-network                                            # needs root and iproute2; half an hour, quiet
    make bench-network ARGS="--cases 5M --rates 200mbit --rounds 4"
    make bench-network ARGS="--quick"                             # a tiny model, nothing written: does it all run?

A step's time of each transport beside that of lossless messages and of DDP, and the bytes that the interface sent
beside those that `describe` says. CLAIMS are of 25M parameters at 200 Mbit/s.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import signal
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]  # as a module and as a file, from anywhere

import attrs
import torch
from rich.console import Console

from benchmarks import cable, ranks, report
from benchmarks.harness import PAIRS_PER_MAKING, Series
from benchmarks.network_contenders import compete
from benchmarks.report import Rows
from benchmarks.sharding_contenders import AGAIN, Case

CASES = [Case("5M", width=256, layers=6, rows=4, context=128), Case("25M", width=512, layers=8, rows=4, context=128)]
TINY = Case("tiny", width=64, layers=1, rows=1, context=8)
LOOPBACK, RATES = "loopback", ["1gbit", "200mbit", "100mbit"]
CLAIMED = ("25M", "200mbit")
WIRE_WITHIN = 0.03

# who stands beside whom, and the ratio of times that is claimed; what stands together runs in the same processes
CLAIMS: list[dict[tuple[str, str], float | None]] = [
    {
        ("fds 0", "DDP"): None,
        ("fds 0, 16 bits", "DDP"): None,
        ("fds 0, 8 bits", "DDP"): 0.35,
        ("fds 0, 4 bits", "DDP"): None,
        ("fds 0, 1 bit", "DDP"): None,
        ("fds 0, top 1%", "DDP"): None,
    },
    {("fds 3, 8 bits", "fds 3"): None, ("fds 3, weights 8, gradients 4", "fds 3"): 0.40},
]


@attrs.frozen
class Timed:
    """What ran together: the seconds of each contender, round by round, and what it sent in a step."""

    case: Case
    claims: dict[tuple[str, str], float | None]
    seconds: dict[str, tuple[float, ...]]
    wire_bytes: dict[str, float]
    told_bytes: dict[str, int]

    def series(self, one: str, other: str) -> Series:
        """Return the times of one contender beside those of another."""
        return Series(self.seconds[one], self.seconds[other])

    def at_most(self, pair: tuple[str, str]) -> float | None:
        """Return the claim of a pair: of one case over one cable, after what is not claimed elsewhere."""
        return self.claims.get(pair) if (self.case.name, self.case.rate) == CLAIMED else None


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    options = parse()
    if options.rates != [LOOPBACK] and (why := cable.missing()):
        print(f"no cable here: {why}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # and with it the ranks
    ranks.prepare(["benchmarks.network_contenders"])
    console = Console()
    timed = [
        measured(attrs.evolve(case, rate=rate), claims, options.rounds, console)
        for rate in options.rates
        for case in options.cases
        for claims in CLAIMS
    ]
    tables = [table_of_time(timed), table_of_bytes(timed)]
    report.show_tables(tables, console)
    if options.out:
        facts = {
            "what": "a training step of a GPT, float32, AdamW, on 2 gloo ranks of one thread each, joined by a cable",
            "wire": "what the interface of rank 0 sent in a step, headers and acknowledgements included",
            "by formula": "what `describe` says; at stage 3 at most that: what is still whole is not sent again",
        }
        console.print(f"written: {report.write_tables(tables, options.name, facts, folder=Path(options.out))}")
    met = [one.series(*pair).reaches(one.at_most(pair)) for one in timed for pair in one.claims]
    return 1 if False in met and not options.quick else 0


def measured(case: Case, claims: dict[tuple[str, str], float | None], rounds: int, console: Console) -> Timed:
    """Return what came of one comparison over a cable."""
    names = list(dict.fromkeys(name for pair in claims for name in reversed(pair)))
    names.append(names[0] + AGAIN)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    over = case.rate.replace(LOOPBACK, "")
    for turn in range(0, rounds, PAIRS_PER_MAKING):
        some = min(PAIRS_PER_MAKING, rounds - turn)
        found, _ = ranks.launch(compete, case, tuple(names), some, 2, turn, over=over)
        for name in names:
            seconds[name] += found.turns.seconds[name]
    lines = ", ".join(f"{name} {1e3 * statistics.median(times):.0f}" for name, times in seconds.items())
    console.print(f"[dim]{case}: {lines} ms[/]", highlight=False, soft_wrap=True)
    return Timed(case, claims, {n: tuple(s) for n, s in seconds.items()}, found.wire_bytes, found.told_bytes)


def table_of_time(timed: list[Timed]) -> Rows:
    """Return the ratios of all pairs, the A/A last."""
    rows = []
    for one in timed:
        first = next(iter(one.seconds))
        for contender, beside in [*one.claims, (first + AGAIN, first)]:
            series, at_most = one.series(contender, beside), one.at_most((contender, beside))
            verdict = report.verdict(at_most, series.reaches(at_most))
            rows.append([contender, str(one.case), beside, str(len(series.ratios)), *report.timed(series), verdict])
    return "Time", ["contender", "case", "beside", "rounds", "ms", "ms beside", "ratio", "95% interval", "claim"], rows


def table_of_bytes(timed: list[Timed]) -> Rows:
    """Return what each contender sent, as the interface and as `describe` say."""
    rows = []
    for one in timed:
        for name, wire in one.wire_bytes.items():
            told = one.told_bytes[name]
            more = wire / told - 1
            met = more <= WIRE_WITHIN and (name.startswith("fds 3") or more >= -WIRE_WITHIN)
            claimed = one.case.rate != LOOPBACK and "DDP" not in name  # over the loopback both ranks count, and others
            verdict = report.verdict(1 + WIRE_WITHIN, met) if claimed else ""
            rows.append([name, str(one.case), f"{wire / 1e6:.2f}", f"{told / 1e6:.2f}", f"{more:+.1%}", verdict])
    return "Bytes of a step", ["contender", "case", "MB on the wire", "MB by formula", "apart", "claim"], rows


def parse() -> argparse.Namespace:
    """Return the options, `cases` as a list of `Case`."""
    words = lambda text: [word.strip() for word in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=words, default=["25M"], help="of 5M, 25M (25M)")
    parser.add_argument("--rates", type=words, default=RATES, help="of cables (1gbit,200mbit,100mbit), or loopback")
    parser.add_argument("--rounds", type=int, default=8, help="each a step of every contender (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds, one cable, nothing written")
    parser.add_argument("--out", default=str(report.RESULTS), help="where the table goes (benchmarks/results)")
    parser.add_argument("--name", default="network", help="in the name of the table (%(default)s)")
    options = parser.parse_args()
    options.cases = [case for case in CASES if case.name in options.cases]
    if options.quick:
        options.cases, options.rates, options.rounds, options.out = [TINY], options.rates[:1], 2, None
    if not options.cases or options.rounds < 1:
        parser.error("nothing to do")
    return options


if __name__ == "__main__":
    sys.exit(main())
