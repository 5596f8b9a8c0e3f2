"""Saving and loading with fds beside torch.distributed.checkpoint, torch.save and raw writes: 500 MB, all durable.

    make bench-storage                                            # about a quarter of an hour, quiet
    make bench-storage ARGS="--quick"                             # a small state, nothing written: does it all run?
    make bench-storage ARGS="--only saving --ranks 1 --rounds 6"  # a short look

Claims: CLAIMS below, of time; and of memory, `benchmarks/storage_memory.py`.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]  # as a module and as a file, from anywhere

import attrs
import torch
from rich.console import Console

from benchmarks import ranks, report
from benchmarks.harness import PAIRS_PER_MAKING, Series
from benchmarks.report import Rows
from benchmarks.sharding_contenders import AGAIN, Case
from benchmarks.storage_contenders import MIB, Manner, Setting
from benchmarks.storage_memory import SAVES, WEIGHED, Beyond, at_most, store, weigh
from benchmarks.storage_trials import SMALL, STEPS, compete, try_manners

LARGE = Case("large", width=384, layers=24, rows=1, context=8)
QUICK = Case("quick", width=256, layers=6, rows=1, context=8)
MANNERS = [Manner(mib * MIB, at_once) for mib in (8, 16, 32, 64) for at_once in (1, 2)]
MANNER_ROUNDS = 4

# who stands beside whom, and the ratio of times claimed (None: it only informs); what stands in one part runs in the
# same processes
CLAIMS: dict[str, dict[tuple[str, str], float | None]] = {
    "saving": {
        ("fds.save", "dcp.save"): 0.5,
        ("fds.save", "torch.save"): 0.6,
        ("fds.save", "raw writes"): 1 / 0.7,  # 0.7 of the bytes a second
    },
    "cold": {("fds.load, cold", "dcp.load, cold"): 0.8, ("fds.load, cold", "torch.load, cold"): None},
    "warm": {("fds.load, warm", "dcp.load, warm"): 0.8, ("fds.load, warm", "torch.load, warm"): None},
    "stall": {("fds stall", "dcp stall"): 0.05, ("fds stall", "dcp stall, stager kept"): None},
    "beside": {("step beside fds.save_async", "step"): 1.05, ("step beside dcp.async_save", "step"): None},
}
ITSELF = {"beside": "step"}  # who runs a second time; elsewhere the first one
NEEDS_A_FREE_CORE = ("beside",)  # on one rank only
PARTS = [*CLAIMS, "memory"]
WORDS = {True: "yes", False: "NO", None: "untried"}


@attrs.frozen
class Timed:
    """What ran together: the seconds of each contender, round by round."""

    setting: Setting
    part: str
    itself: str  # who ran a second time
    seconds: dict[str, tuple[float, ...]]

    def rows(self) -> Iterator[tuple[str, str, Series, float | None]]:
        """Yield (contender, beside, series, claim), the A/A last."""
        for (one, other), claim in [*CLAIMS[self.part].items(), ((self.itself + AGAIN, self.itself), None)]:
            yield one, other, Series(self.seconds[one], self.seconds[other]), claim


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    options = parse()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # and with it the ranks and the files
    ranks.prepare(["benchmarks.storage_memory"])
    console = Console()
    tell = lambda text: console.print(f"[dim]{text}[/]", highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix=".storage-", dir=options.dir) as room:
        tables, met, manners = measure(options, Path(room), tell)
    report.show_tables(tables, console)
    if options.out:
        path = report.write_tables(tables, options.name, facts(options, manners), folder=Path(options.out))
        console.print(f"written: {path}")
    return 0 if met or options.quick else 1  # a small state is all overhead, and claims nothing


def measure(options: argparse.Namespace, room: Path, tell) -> tuple[list[Rows], bool, dict[str, str]]:
    """Return the tables, whether all claims are met, and the best manner of raw writes on so many ranks."""
    timed: list[Timed] = []
    raw: dict[Setting, dict[Manner, list[float]]] = {}
    for setting in (Setting(options.case, num_ranks) for num_ranks in options.ranks):
        if "saving" in options.only:
            raw[setting] = launch(setting, try_manners, MANNERS, 1 if options.quick else MANNER_ROUNDS, str(room))
            best = min(MANNERS, key=lambda one: statistics.median(raw[setting][one]))
            tell(f"{setting}: raw writes are best in blocks of {best}")
            setting = attrs.evolve(setting, manner=best)
        timed += [
            time_part(setting, part, options.rounds, room, tell)
            for part in CLAIMS
            if part in options.only and not (part in NEEDS_A_FREE_CORE and setting.num_ranks > 1)
        ]
    beyond = {
        (Setting(options.case, num_ranks), name): memory_of(Setting(options.case, num_ranks), name, room, tell)
        for num_ranks in options.ranks
        for name in WEIGHED
        if "memory" in options.only
    }
    met = all(series.reaches(claim) is not False for one in timed for *_, series, claim in one.rows())
    met &= all(fits(name, one) is not False for (_, name), one in beyond.items())
    tables = [
        *(tables_of_time(timed) if timed else []),
        *([table_of_raw(raw)] if raw else []),
        *([table_of_memory(beyond)] if beyond else []),
    ]
    return tables, met, {str(one.setting): str(one.setting.manner) for one in timed if one.part == "saving"}


def time_part(setting: Setting, part: str, rounds: int, room: Path, tell) -> Timed:
    """Return the contenders of a part, timed."""
    names = list(dict.fromkeys(name for pair in CLAIMS[part] for name in pair))
    itself = ITSELF.get(part, names[0])
    names.append(itself + AGAIN)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(0, rounds, PAIRS_PER_MAKING):  # then all are made anew, in fresh processes
        more = min(PAIRS_PER_MAKING, rounds - turn)
        with emptied(room):
            for name, some in launch(setting, compete, names, more, turn, str(room)).items():
                seconds[name] += some
    tell(f"{setting}: " + ", ".join(f"{name} {1e3 * statistics.median(s):.4g}" for name, s in seconds.items()) + " ms")
    return Timed(setting, part, itself, {name: tuple(s) for name, s in seconds.items()})


def memory_of(setting: Setting, name: str, room: Path, tell) -> Beyond:
    """Return what this takes, in processes of its own."""
    with emptied(room):
        if "load" in name:
            launch(setting, store, name, str(room / "kept"))
        beyond = launch(setting, weigh, name, str(room / "kept"))
    tell(f"{setting}: {name} takes {beyond.beyond_bytes / 1e6:.1f} MB beyond the state")
    return beyond


def launch(setting: Setting, work: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `work` returns on the first of as many fresh ranks."""
    if setting.num_ranks > 1:
        return ranks.launch(work, setting, *arguments)[0]
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as process:
        return process.submit(work, setting, *arguments).result()


@contextlib.contextmanager
def emptied(room: Path):
    """Leave nothing in a folder."""
    try:
        yield
    finally:
        for path in room.iterdir():
            shutil.rmtree(path)


def fits(name: str, beyond: Beyond) -> bool | None:
    """Tell whether the claim of memory is met; None where nothing is claimed, or nothing was tried."""
    claim = at_most(name, beyond)
    return None if claim is None or (beyond.met == 0 and "steps" in name) else beyond.beyond_bytes <= claim


def tables_of_time(timed: list[Timed]) -> list[Rows]:
    """Return the ratios, and the median of every contender."""
    rows, medians = [], []
    for one in timed:
        rows += [
            [
                contender,
                str(one.setting),
                beside + (" (A/A)" if contender.endswith(AGAIN) else ""),
                *report.timed(series),
                verdict(claim, series.reaches(claim)),
            ]
            for contender, beside, series, claim in one.rows()
        ]
        size = one.setting.rank_bytes * one.setting.num_ranks if one.part in ("saving", "cold", "warm") else None
        medians += [
            [
                name,
                str(one.setting),
                f"{1e3 * statistics.median(s):.4g}",
                f"{1e3 * min(s):.4g}",
                f"{size / statistics.median(s) / 1e9:.2f}" if size else "",
            ]
            for name, s in one.seconds.items()
        ]
    rounds = len(next(iter(timed[0].seconds.values())))
    return [
        (
            f"Time ({rounds} rounds)",
            ["contender", "on", "beside", "ms", "ms beside", "ratio", "95% interval", "claim"],
            rows,
        ),
        ("Each (the slowest rank)", ["contender", "on", "median ms", "least ms", "GB/s"], medians),
    ]


def table_of_raw(raw: dict[Setting, dict[Manner, list[float]]]) -> Rows:
    """Return how fast raw writes were in each manner, before the rounds."""
    rows = [
        [
            str(manner),
            str(setting),
            f"{1e3 * statistics.median(s):.4g}",
            f"{1e3 * min(s):.4g}",
            f"{setting.rank_bytes * setting.num_ranks / statistics.median(s) / 1e9:.2f}",
        ]
        for setting, seconds in raw.items()
        for manner, s in seconds.items()
    ]
    header = ["a rank's blocks", "on", "median ms", "least ms", "GB/s"]
    return ("Raw writes, past the cache: which blocks are best?", header, rows)


def table_of_memory(beyond: dict[tuple[Setting, str], Beyond]) -> Rows:
    """Return what everything takes."""
    mb = lambda count: f"{count / 1e6:.1f}"
    rows = []
    for (setting, name), one in beyond.items():
        claim = at_most(name, one)
        told = "" if claim is None else f"≤ {mb(claim)}: {WORDS[fits(name, one)]}"
        met = f"{one.met} of {SAVES}" if "steps" in name else ""
        rows.append([name, str(setting), mb(one.state_bytes), mb(one.beyond_bytes), mb(one.helper_bytes), met, told])
    return (
        "Resident memory beyond the state at its peak (MB a rank)",
        ["contender", "on", "state", "beyond", "helpers", "steps met", "claim"],
        rows,
    )


def verdict(claim: float | None, met: bool | None) -> str:
    """Return the cell of a claim: `report.verdict`, to three digits."""
    return report.verdict(None if claim is None else float(f"{claim:.3g}"), met)


def facts(options: argparse.Namespace, manners: dict[str, str]) -> dict[str, str]:
    """Return what ran, for the file."""
    case, shapes = options.case, Setting(options.case, 1).shapes
    return {
        "what ran": f"the state of AdamW on a GPT (width {case.width}, {case.layers} layers): {len(shapes)} tensors, "
        f"{sum(x.nbytes for x in shapes.values()):,} bytes; a rank has one thread; two ranks (gloo) share the cores",
        "all": "a save ends when its files and their names are on the disk (fsync); removing it is outside the clock; "
        "everyone's first was loaded and compared bit for bit",
        "fds": "checksums written and verified; on 2 ranks shard_optimizer, stage 3",
        "dcp": "torch.distributed.checkpoint by default (it has no checksums); on 2 ranks every tensor is a DTensor, "
        "Shard(0)",
        "torch": "torch.save with its checksum, a file a rank; torch.load(weights_only=True)",
        "raw writes": "O_DIRECT, as many bytes, from huge pages; "
        + ", ".join(f"{setting}: {manner}" for setting, manner in manners.items()),
        "cold": "posix_fadvise(DONTNEED) of every file, seen to have worked; what the disk itself keeps stays",
        "step": f"of a GPT of width {SMALL.width}, {SMALL.layers} layers, {SMALL.rows} x {SMALL.context} tokens; a "
        f"time is the mean of {STEPS} that began and ended while a save of the large state ran",
        "disk": " ".join(reversed(mount(options.dir)[:3])),
    }


def mount(folder: Path) -> list[str]:
    """Return the line of /proc/mounts that a folder is on, in words."""
    lines = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return max((x for x in lines if folder.resolve().is_relative_to(x[1])), key=lambda x: len(x[1]))


def parse() -> argparse.Namespace:
    """Return the options."""
    words = lambda text: [word.strip() for word in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="each of every contender (%(default)s)")
    parser.add_argument("--only", type=words, default=PARTS, help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--ranks", type=words, default=["1", "2"], help="of 1, 2 (both)")
    parser.add_argument("--dir", type=Path, default=ROOT.parent, help="on the disk to measure (beside the repository)")
    parser.add_argument("--quick", action="store_true", help="a small state, 2 rounds, nothing written")
    parser.add_argument("--out", help="where the table goes (benchmarks/results, if all is measured)")
    parser.add_argument("--name", default="storage", help="in the name of the table (%(default)s)")
    options = parser.parse_args()
    if not set(options.only) <= set(PARTS) or not set(options.ranks) <= {"1", str(ranks.NUM_RANKS)}:
        parser.error("no such part, or so many ranks")
    if options.rounds < 1:
        parser.error("nothing to do")
    if mount(options.dir)[2] in ("tmpfs", "ramfs"):
        parser.error(f"{options.dir} is in memory: name a folder of a disk with --dir")
    whole = options.only == PARTS and options.ranks == ["1", "2"] and not options.quick
    options.ranks = [int(x) for x in options.ranks]
    options.case, options.rounds = (QUICK, min(options.rounds, 2)) if options.quick else (LARGE, options.rounds)
    options.out = options.out or (str(report.RESULTS) if whole else None)
    return options


if __name__ == "__main__":
    sys.exit(main())
