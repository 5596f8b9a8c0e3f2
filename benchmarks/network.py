"""Messages in fewer bytes over a cable that shows what a byte costs: two gloo ranks in network namespaces of their own.

    make bench-network                                            # needs root and iproute2; an hour, quiet
    make bench-network ARGS="--cases 5M --rates 200mbit --rounds 4"
    make bench-network ARGS="--only 'DDP; fds 0, 8 bits'"         # part by part: the table is of all in --runs
    make bench-network ARGS="--quick"                             # a tiny model, nothing written: does it all run?

A step's time of each transport beside that of lossless messages and of DDP, the bytes that the interface sent beside
those that `describe` says, and how much of the sending is hidden behind arithmetic. CLAIMS are of 25M parameters at
200 Mbit/s.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import json
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

CASES = [
    Case("5M", width=256, layers=6, rows=4, context=128),
    Case("25M", width=512, layers=8, rows=4, context=128),
    Case("25M short", width=512, layers=8, rows=1, context=64),
]
TINY = Case("tiny", width=64, layers=1, rows=1, context=8)
LOOPBACK, RATES = "loopback", ["loopback", "1gbit", "200mbit", "100mbit"]
BITS = {"1gbit": 1e9, "200mbit": 2e8, "100mbit": 1e8}  # in a second
CLAIMED = [("25M", "200mbit"), ("25M short", "200mbit")]
WIRE_WITHIN, OVERLAP_WITHIN = 0.03, 1.15

Pair = tuple[str, str]  # a contender, and who stands beside it


@attrs.frozen
class Group:
    """Contenders that run together in the same processes: the ratios of times that are claimed, or shown only."""

    claims: dict[Pair, float | None]
    num_ranks: int = 2


GROUPS = [
    Group(
        {
            ("fds 0", "DDP"): None,
            ("fds 0, 16 bits", "DDP"): None,
            ("fds 0, 8 bits", "DDP"): 0.35,
            ("fds 0, 4 bits", "DDP"): None,
            ("fds 0, 1 bit", "DDP"): None,
            ("fds 0, top 1%", "DDP"): None,
        }
    ),
    Group({("fds 3, 8 bits", "fds 3"): None, ("fds 3, weights 8, gradients 4", "fds 3"): 0.40}),
    Group(
        {
            ("fds onebit_adam", "DDP"): 0.20,
            ("fds onebit_adam", "DeepSpeed OnebitAdam"): 0.8,
            ("DeepSpeed OnebitAdam", "DDP"): None,
            ("fds zero_one_adam", "DDP"): 0.12,
            ("fds local_updates", "DDP"): 0.10,
        }
    ),
    Group(
        {
            ("nodes, 8 bits", "nodes, lossless"): None,
            ("nodes, 8 bits inside, 8 between", "nodes, lossless"): None,
            ("nodes, 8 bits inside, 4 between", "nodes, lossless"): None,
            ("nodes, 8 bits inside, 4 between", "nodes, 8 bits"): None,
        },
        num_ranks=4,
    ),
]


@attrs.frozen
class Timed:
    """What ran together: the seconds of each contender, round by round, and what it sent in a step."""

    case: Case
    seconds: dict[str, list[float]]
    wire_bytes: dict[str, float]
    told_bytes: dict[str, float | None]

    @property
    def pairs(self) -> dict[Pair, float | None]:
        """The ratios of those that ran, and what is claimed of each in this case."""
        claimed = (self.case.name, self.case.rate) in CLAIMED
        every = {pair: at_most for group in GROUPS for pair, at_most in group.claims.items()}
        return {pair: at_most if claimed else None for pair, at_most in every.items() if {*pair} <= self.seconds.keys()}

    def series(self, one: str, other: str) -> Series:
        """Return the times of one contender beside those of another."""
        return Series(tuple(self.seconds[one]), tuple(self.seconds[other]))

    def text(self) -> str:
        """Return it as a line of JSON."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def read(cls, text: str) -> Timed:
        """Return what a line says."""
        found = json.loads(text)
        return cls(**{**found, "case": Case(**found["case"])})


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
    timed = [Timed.read(line) for line in options.runs.read_text().splitlines()] if options.runs.exists() else []
    for rate in options.rates if options.rounds else []:
        for case in options.cases:
            for group in options.groups:
                timed.append(measured(attrs.evolve(case, rate=rate), group, options, console))
                if not options.quick:
                    options.runs.parent.mkdir(parents=True, exist_ok=True)
                    with options.runs.open("a") as file:
                        file.write(timed[-1].text() + "\n")
    tables = [table_of_time(timed), table_of_bytes(timed), table_of_overlap(timed)]
    report.show_tables(tables, console)
    if options.out:
        facts = {
            "what": "a training step of a GPT, float32, AdamW, on 2 gloo ranks of one thread each, joined by a cable; "
            "nodes are two ranks at each end, and the four share the cores of this machine",
            "onebit": "both after warm-up, with lr=0; DeepSpeed's is its class alone, without the engine",
            "zero_one_adam": "with a frozen variance; the mean over turns of 16 steps, of which the last one agrees",
            "local_updates": "the mean over turns of 16 steps, of which the last one agrees in 8 bits",
            "wire": "what the interface of rank 0 sent in a step, headers and acknowledgements included",
            "by formula": "what `describe` says; at stage 3 at most that: what is still whole is not sent again",
            "overlap": "time / max(arithmetic, bytes / rate); arithmetic is the step over the loopback",
        }
        console.print(f"written: {report.write_tables(tables, options.name, facts, folder=Path(options.out))}")
    met = [one.series(*pair).reaches(at_most) for one in timed for pair, at_most in one.pairs.items()]
    return 1 if False in met and not options.quick else 0


def measured(case: Case, group: Group, options: argparse.Namespace, console: Console) -> Timed:
    """Return what came of one comparison over a cable."""
    names = list(dict.fromkeys(name for pair in group.claims for name in reversed(pair)))
    names += [names[0] + AGAIN] if options.again else []
    seconds: dict[str, list[float]] = {name: [] for name in names}
    over = case.rate.replace(LOOPBACK, "")
    for turn in range(0, options.rounds, PAIRS_PER_MAKING):
        some = min(PAIRS_PER_MAKING, options.rounds - turn)
        found, *_ = ranks.launch(compete, case, tuple(names), some, 1, turn, over=over, num_ranks=group.num_ranks)
        for name in names:
            seconds[name] += found.turns.seconds[name]
    lines = ", ".join(f"{name} {1e3 * statistics.median(times):.0f}" for name, times in seconds.items())
    console.print(f"[dim]{case}: {lines} ms[/]", highlight=False, soft_wrap=True)
    return Timed(case, seconds, found.wire_bytes, found.told_bytes)


def table_of_time(timed: list[Timed]) -> Rows:
    """Return the ratios of all pairs, the A/A last."""
    rows = []
    for one in timed:
        first = next(iter(one.seconds))
        itself: dict[Pair, float | None] = {(first + AGAIN, first): None} if first + AGAIN in one.seconds else {}
        for (contender, beside), at_most in {**one.pairs, **itself}.items():
            series = one.series(contender, beside)
            verdict = report.verdict(at_most, series.reaches(at_most))
            rows.append([contender, str(one.case), beside, str(len(series.ratios)), *report.timed(series), verdict])
    return "Time", ["contender", "case", "beside", "rounds", "ms", "ms beside", "ratio", "95% interval", "claim"], rows


def table_of_bytes(timed: list[Timed]) -> Rows:
    """Return what each contender sent, as the interface and as `describe` say."""
    rows = []
    for one in timed:
        for name, wire in one.wire_bytes.items():
            told = one.told_bytes[name]
            if name.endswith(AGAIN) or told is None or one.case.rate == LOOPBACK:  # there both ranks count, and others
                continue
            more = wire / told - 1
            met = more <= WIRE_WITHIN and (name.startswith("fds 3") or more >= -WIRE_WITHIN)
            verdict = "" if name == "DDP" else report.verdict(1 + WIRE_WITHIN, met)
            rows.append([name, str(one.case), f"{wire / 1e6:.2f}", f"{told / 1e6:.2f}", f"{more:+.1%}", verdict])
    return "Bytes of a step", ["contender", "case", "MB on the wire", "MB by formula", "apart", "claim"], rows


def table_of_overlap(timed: list[Timed]) -> Rows:
    """Return how long each step took beside the longer one of its arithmetic and its sending."""
    rows = []
    alone = {
        (one.case.name, name): statistics.median(times)
        for one in timed
        if one.case.rate == LOOPBACK
        for name, times in one.seconds.items()
    }
    for one in (one for one in timed if one.case.rate != LOOPBACK):
        for name, times in one.seconds.items():
            if (arithmetic := alone.get((one.case.name, name))) is None or name.endswith(AGAIN):
                continue
            sending, took = 8 * one.wire_bytes[name] / BITS[one.case.rate], statistics.median(times)
            ratio = took / max(arithmetic, sending)
            cells = [f"{1e3 * x:.4g}" for x in (took, arithmetic, sending)]
            verdict = (
                "" if not name.startswith(("fds", "nodes")) else report.verdict(OVERLAP_WITHIN, ratio <= OVERLAP_WITHIN)
            )
            rows.append([name, str(one.case), *cells, f"{ratio:.3f}", verdict])
    return "Overlap", ["contender", "case", "ms", "ms of arithmetic", "ms of sending", "ratio", "claim"], rows


def parse() -> argparse.Namespace:
    """Return the options, `cases` as a list of `Case`."""
    words = lambda text: [word.strip() for word in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=words, default=["25M"], help="of 5M, 25M, 25M short (25M)")
    parser.add_argument("--rates", type=words, default=RATES, help="of cables (1gbit,200mbit,100mbit), and loopback")
    parser.add_argument("--only", metavar="NAMES", help="contenders, with ; between: pairs of others are left out")
    parser.add_argument(
        "--rounds", type=int, default=8, help="each a step of every contender (%(default)s); 0: tables only"
    )
    parser.add_argument("--once", dest="again", action="store_false", help="leave out the first one beside itself")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds, one cable, nothing written")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/network.jsonl"), help="where runs are added (%(default)s)"
    )
    parser.add_argument("--out", default=str(report.RESULTS), help="where the table goes (benchmarks/results)")
    parser.add_argument("--name", default="network", help="in the name of the table (%(default)s)")
    options = parser.parse_args()
    options.cases = [case for case in CASES if case.name in options.cases]
    only = None if options.only is None else {name.strip() for name in options.only.split(";")}
    kept = lambda group: {pair: x for pair, x in group.claims.items() if only is None or {*pair} <= only}
    options.groups = [attrs.evolve(group, claims=pairs) for group in GROUPS if (pairs := kept(group))]
    if options.quick:
        options.cases, options.rates, options.rounds, options.out = [TINY], options.rates[:1], 2, None
    if not options.cases or not options.groups or options.rounds < 0:
        parser.error("nothing to do")
    return options


if __name__ == "__main__":
    sys.exit(main())
