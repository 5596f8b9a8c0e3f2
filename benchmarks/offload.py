"""Training with state on the host and on a disk: beside the disk's own speed, the step in memory, and DeepSpeed.

    make bench-offload                                   # half an hour, quiet
    make bench-offload ARGS="--parts update,step"        # these alone
    make bench-offload ARGS="--quick"                    # small, nothing written: does it all run?

Parts: `update` (an update of 50M parameters from and to disk beside raw reads and writes of the same bytes), `step` (a
whole step beside the larger of the one in memory and its bytes at raw speed), `memory` (resident bytes beside what
`describe` says), `peers` (beside DeepSpeed's `offload_optimizer`, on two gloo ranks of one thread each).
3 billion parameters: `benchmarks/offload_large.py`.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]  # as a module and as a file, from anywhere

import attrs
import torch
from rich.console import Console

import fds
from benchmarks import harness, ranks, report
from benchmarks.harness import Series
from benchmarks.offload_contenders import DISK, LEAST, ROOM, Manner, Steps, Updates, compete, reside
from benchmarks.raw_disk import LIKE_AN_UPDATE, MANNERS, RawFile, disk_bytes
from benchmarks.report import Rows
from benchmarks.sharding_contenders import AGAIN, Case

MB = 10**6
CPU = torch.device("cpu")
FASTEST = 3  # ways to ask the raw disk that run beside an update
LIVE = 2**27  # bytes that stage 3 may have whole
STEP = Case("25M", width=512, layers=8, rows=4, context=256)
MEMORY = Case("102M", width=1024, layers=8, rows=1, context=8)
PEERS = [
    Case("5M", width=256, layers=6, rows=4, context=128),
    Case("25M", width=512, layers=8, rows=4, context=128),
    Case("25M of few tokens", width=512, layers=8, rows=1, context=32),
]
TINY = Case("tiny", width=64, layers=2, rows=1, context=8)
PLACED = {  # by all that lives elsewhere, with the ones before
    "moments": Manner("disk"),
    "masters": Manner("disk", "disk"),
    "gradients": Manner("disk", "disk", "disk"),
    "host": Manner("host", "host"),
}
UPDATE_AT_MOST, STEP_AT_MOST, PEERS_AT_MOST, RESIDENT_WITHIN = 1 / 0.85, 1.1, 0.7, 0.03
BESIDE = {
    "DeepSpeed 1 cpu": ["fds 1 host"],
    "DeepSpeed 2 cpu": ["fds 2 host"],
    "DeepSpeed 3 cpu": ["fds 3 host"],
    "DeepSpeed 3 nvme": ["fds 3 disk"],
}
HEADER = ["contender", "case", "beside", "rounds", "ms", "ms beside", "ratio", "95% interval", "claim"]


@attrs.frozen
class Timed:
    """A contender beside another, round by round, and what is claimed of the ratio."""

    name: str
    case: str
    beside: str
    series: Series
    at_most: float | None = None

    def row(self) -> list[str]:
        """Return its line of the table."""
        verdict = report.verdict(self.at_most, self.series.reaches(self.at_most))
        return [self.name, self.case, self.beside, str(len(self.series.ratios)), *report.timed(self.series), verdict]


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # and with it what is on the disk
    console = Console()
    tell = lambda text: console.print(f"[dim]{text}[/]", highlight=False, soft_wrap=True)
    tables: list[Rows] = []
    met = True
    with tempfile.TemporaryDirectory(prefix=".offload-", dir=options.dir) as folder:
        os.environ[ROOM] = folder
        for part in options.parts:
            more, good = PARTS[part](options, Path(folder), tell)
            tables += more
            met &= good
    report.show_tables(tables, console)
    if options.out:
        path = report.write_tables(tables, "offload", facts(), folder=Path(options.out))
        console.print(f"written: {path}")
    return 0 if met or options.quick else 1


def timed_update(options: argparse.Namespace, folder: Path, tell) -> tuple[list[Rows], bool]:
    """Time an update from and to disk, raw reads and writes of as many bytes, and an update in memory."""
    name = "from and to disk"
    disk, memory = Updates(Manner(moments="disk"), folder), Updates(Manner(), folder)
    moved = disk.moved
    raw = RawFile(folder, moved)
    tried = raw.fastest(read=moved, write=moved)
    best, again = list(tried)[:FASTEST], "raw again"
    as_much = f"raw, {LIKE_AN_UPDATE}"
    asks = {f"raw, {one}": functools.partial(raw.move, one, read=moved, write=moved) for one in best}
    asks_alike = {as_much: functools.partial(raw.move, LIKE_AN_UPDATE, read=moved, write=moved)}
    work = {name: disk.seconds} | asks | asks_alike | {"in memory": memory.seconds}
    seconds = in_turns(work | {again: next(iter(asks.values()))}, options.rounds)
    alone = {
        m: [sorted(raw.move(m, **way) for _ in "123")[1] for way in ({"read": moved}, {"write": moved})] for m in tried
    }
    raw.close()
    fastest = min(asks, key=lambda name: statistics.median(seconds[name]))
    tell(", ".join(f"{n} {1e3 * statistics.median(s):.0f} ms" for n, s in seconds.items()))
    case = f"50M parameters, {moved // MB} MB read, as many written"
    rows = [Timed(name, case, fastest, _series(seconds, name, fastest), UPDATE_AT_MOST)]
    rows += [Timed(name, case, other, _series(seconds, name, other)) for other in (as_much, "in memory")]
    rows.append(Timed(again, case, f"{next(iter(asks))} (A/A)", _series(seconds, again, next(iter(asks)))))
    ways = [
        [
            str(m),
            *(f"{1e3 * x:.0f}" for x in alone[m]),
            f"{1e3 * statistics.median(both):.0f}",
            f"{1e3 * min(both):.0f}",
        ]
        for m, both in tried.items()
    ]
    return [
        ("An update of AdamW", HEADER, [one.row() for one in rows]),
        (f"Raw, {moved // MB} MB", ["blocks x at once", "read, ms", "write, ms", "both, ms", "both at best, ms"], ways),
    ], _all_met(rows)


def timed_step(options: argparse.Namespace, folder: Path, tell) -> tuple[list[Rows], bool]:
    """Time whole steps beside the larger of the same step in memory and its bytes raw, with speculation and without."""
    rows = [row for name in options.placed for row in timed_placed(name, options, folder, tell)]
    return [("Whole steps, one process", HEADER, [one.row() for one in rows])], _all_met(rows)


def timed_placed(name: str, options: argparse.Namespace, folder: Path, tell) -> list[Timed]:
    """Time whole steps of which some leaves live elsewhere."""
    case, manner = TINY if options.quick else STEP, PLACED[name]
    shard = [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=3)] if manner.masters == "disk" else []
    make = lambda manner: Steps(case, manner, folder / "step", *shard)
    plain, steps = make(Manner()), {name: make(manner)}
    if manner.moments == "disk":
        steps[name + ", speculating"] = make(attrs.evolve(manner, speculate=True))
    losses = [[float(one()) for _ in "123"] for one in (plain, *steps.values())]
    assert all(one == losses[0] for one in losses), name
    before = disk_bytes()
    steps[name]()
    read, written = (b - a for a, b in zip(before, disk_bytes(), strict=True))
    raw = RawFile(folder, max(read, written, 1))
    best = next(iter(raw.fastest(read=read, write=written, rounds=2)))
    in_memory = functools.partial(harness.seconds, plain, 1, CPU)
    work = {one: functools.partial(harness.seconds, step, 1, CPU) for one, step in steps.items()}
    work |= {"in memory": in_memory, "in memory again": in_memory}
    seconds = in_turns(work | {"raw": lambda: raw.move(best, read=read, write=written)}, options.rounds)
    raw.close()
    tell(", ".join(f"{n} {1e3 * statistics.median(s):.0f} ms" for n, s in seconds.items()))
    about = f"{case}{', stage 3' if shard else ''}: {read // MB} MB read, {written // MB} written"
    larger, other = sorted(("in memory", "raw"), key=lambda one: -statistics.median(seconds[one]))
    claimed = list(steps)[-1]
    rows = [
        Timed(
            one, about, f"{larger}, the larger", _series(seconds, one, larger), STEP_AT_MOST * (one == claimed) or None
        )
        for one in steps
    ]
    rows += [Timed(one, about, other, _series(seconds, one, other)) for one in steps]
    again = _series(seconds, "in memory again", "in memory")
    return [*rows, Timed("in memory again", about, "in memory (A/A)", again)]


def resident(options: argparse.Namespace, folder: Path, tell) -> tuple[list[Rows], bool]:
    """Measure what a step with moments and masters on disk holds resident, beside what `describe` says.

    Claimed of processes as they are; beside each one whose malloc keeps no small blocks apart for its threads.
    """
    case = TINY if options.quick else MEMORY
    rows, met = [], True
    for name, manner, stage in (
        ("moments on disk", Manner(moments="disk"), None),
        ("moments, masters on disk", DISK, 2),
        ("moments, masters on disk", DISK, 3),
        ("moments, masters, gradients on disk", Manner("disk", "disk", "disk"), 3),
    ):
        at = "no sharding" if stage is None else f"stage {stage}"
        for malloc, tunables in (("as it is", ""), ("tcache_count=0", "glibc.malloc.tcache_count=0")):
            got, want = alone(weighed, case, manner, stage, str(folder), tunables=tunables)
            apart = got / want - 1
            good = abs(apart) <= RESIDENT_WITHIN or options.quick
            met &= good or bool(tunables)
            verdict = f"within {RESIDENT_WITHIN:.0%}: {'yes' if good else 'NO'}"
            rows.append(
                [name, f"{case}, {at}", malloc, f"{got / MB:.0f}", f"{want / MB:.0f}", f"{apart:+.1%}", verdict]
            )
            tell(" ".join(rows[-1]))
    header = ["contender", "case", "malloc", "MB", "MB stated", "apart", "claim"]
    return [("Resident memory of one process", header, rows)], met


def alone(work: Callable[..., Any], *arguments: Any, tunables: str) -> Any:
    """Return what `work(*arguments)` returns in a process of its own, with these tunables of glibc."""
    before = os.environ.get("GLIBC_TUNABLES", "")
    os.environ["GLIBC_TUNABLES"] = tunables or before
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(work, arguments)
    finally:
        os.environ["GLIBC_TUNABLES"] = before


def weighed(case: Case, manner: Manner, stage: int | None, folder: str) -> tuple[int, int]:
    """Return the most bytes resident in steps above what was before, and what `describe` states. In its own process."""
    torch.set_num_threads(1)
    torch.randn(256, 256) @ torch.randn(256, 256)  # the first product loads its library
    axis, live = fds.mesh(dp=-1)["dp"], LIVE if stage == 3 else None
    more = [] if stage is None else [fds.shard_optimizer(axis, stage=stage, max_live_bytes=live)]
    warm = Steps(TINY, manner, Path(folder), *more)
    warm()
    del warm
    gc.collect()
    before = ranks.high_water(reset=True)
    steps = Steps(case, manner, Path(folder), *more)
    steps()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what making the state took stays in the heap else
    ranks.high_water(reset=True)
    for _ in range(4):
        steps()
    return ranks.high_water(reset=False) - before, stated(steps)


def stated(steps: Steps) -> int:
    """Return the bytes of memory, not on disk, that `describe` says a step holds at its most."""
    said = steps.step.describe(steps.state)
    on_disk = sum(n for place, n in said.places.items() if place.startswith("disk"))
    sums = said.num_bytes["gradients"] if "disk" in said.lives.get("gradients", "") else 0
    return sum(said.num_bytes.values()) - on_disk - sums


def timed_peers(options: argparse.Namespace, folder: Path, tell) -> tuple[list[Rows], bool]:
    """Time and weigh fds and DeepSpeed with offload, on two ranks."""
    rows, held, met = [], [], True
    ranks.prepare(["benchmarks.offload_contenders", "deepspeed"])
    for case in [TINY] if options.quick else [one for one in PEERS if one.name in options.cases]:
        for peer, mine in ((peer, mine) for peer, mine in BESIDE.items() if peer in options.peers):
            names = (peer, *mine, mine[0] + AGAIN, LEAST)
            for name in ("deepspeed", "fds-1", "fds-2", "fds-3"):
                shutil.rmtree(folder / name, ignore_errors=True)
                (folder / name).mkdir()
            turns, _ = ranks.launch(compete, case, names, options.rounds, 5, 0)
            tell(
                f"{case}: "
                + ", ".join(f"{n} {1e3 * statistics.median(s):.0f}" for n, s in turns.seconds.items())
                + f" ms; first losses {[round(one[-1], 5) for one in turns.losses.values()]}"
            )
            for name in mine:
                series = _series(turns.seconds, name, peer)
                rows.append(Timed(name, str(case), peer, series, PEERS_AT_MOST))
                rows.append(Timed(name, str(case), LEAST, _series(turns.seconds, name, LEAST)))
            rows.append(Timed(LEAST, str(case), peer, _series(turns.seconds, LEAST, peer)))
            aa = _series(turns.seconds, mine[0] + AGAIN, mine[0])
            rows.append(Timed(mine[0] + AGAIN, str(case), f"{mine[0]} (A/A)", aa))
            weights = {name: ranks.launch(reside, case, name, 6)[0] for name in (peer, *mine)}
            tell(", ".join(f"{name} {one.peak_bytes / MB:.0f}" for name, one in weights.items()) + " MB at the peak")
            for name in mine:
                ours, theirs = weights[name].peak_bytes, weights[peer].peak_bytes
                met &= ours < theirs
                held.append(
                    [
                        name,
                        str(case),
                        peer,
                        f"{ours / MB:.0f}",
                        f"{theirs / MB:.0f}",
                        f"{ours / theirs:.3f}",
                        report.verdict(1, ours < theirs),
                    ]
                )
    return [
        ("Beside DeepSpeed's offload_optimizer, two ranks", HEADER, [one.row() for one in rows]),
        (
            "Resident memory at its peak, MB a rank",
            ["contender", "case", "beside", "MB", "MB beside", "ratio", "claim"],
            held,
        ),
    ], met and _all_met(rows)


PARTS = {"update": timed_update, "step": timed_step, "memory": resident, "peers": timed_peers}


def in_turns(work: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds that each piece of work says it took, in every round in turned order."""
    for call in work.values():
        call()
        call()
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for i in range(rounds):
        gc.collect()
        for name in reversed(work) if i % 2 else work:
            seconds[name].append(work[name]())
    return seconds


def _series(seconds: dict[str, list[float]], one: str, other: str) -> Series:
    return Series(tuple(seconds[one]), tuple(seconds[other]))


def _all_met(rows: Sequence[Timed]) -> bool:
    return all(one.series.reaches(one.at_most) is not False for one in rows)


def facts() -> dict[str, str]:
    """Return what ran, for the file."""
    return {
        "raw": "whole blocks by O_DIRECT in large pages, both directions at once, the fastest of "
        + ", ".join(map(str, MANNERS)),
        "all": "float32, AdamW; fds donates its state",
    }


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(PARTS), help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--rounds", type=int, default=20, help="of every comparison (%(default)s)")
    parser.add_argument(
        "--cases",
        type=lambda text: text.split(","),
        default=[one.name for one in PEERS],
        help=f"beside DeepSpeed, of {', '.join(one.name for one in PEERS)}",
    )
    parser.add_argument(
        "--peers",
        type=lambda text: text.split(","),
        default=list(BESIDE),
        help=f"of DeepSpeed's, of {', '.join(BESIDE)}",
    )
    parser.add_argument(
        "--placed", type=lambda text: text.split(","), default=list(PLACED), help=f"whole steps, of {', '.join(PLACED)}"
    )
    parser.add_argument("--dir", default=".", help="a folder on the disk to measure (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small, nothing written")
    parser.add_argument("--out", help="where the table goes (benchmarks/results; nowhere with --quick or --parts)")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no parts {', '.join(sorted(unknown))}: of {', '.join(PARTS)}")
    if options.quick:
        options.rounds = 2
    if options.out is None and not options.quick and options.parts == list(PARTS):
        options.out = str(report.RESULTS)
    return options


if __name__ == "__main__":
    sys.exit(main())
