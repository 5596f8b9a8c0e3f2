"""fds's kernels on a GPU, beside torch eager, torch.compile, what else is installed, and a copy of as many bytes.

    make bench-kernels                                    # on an idle GPU; ended or killed, the next call goes on
    make bench-kernels ARGS="--quick"                     # 5 rounds, nothing kept: does it all run?
    make bench-kernels ARGS="--only norms,losses"         # of it
    make bench-kernels ARGS="--only layer_norm --rounds 40"
    make bench-kernels ARGS="--device cpu --tiny"         # no times worth reading: does it all run?

Goals: goals.py. Without a GPU nothing is timed: what the kernels take of one, as compiled for it, is shown instead.
`make gpu-kernels` runs the same cases, each in a process that it ends where a case hangs.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]  # as a module and as a file, from anywhere

import attrs
import torch
from rich.console import Console
from rich.markup import escape

from benchmarks import kernel_units as units, report
from benchmarks.children import Outcome
from benchmarks.gpu.records import NO_TIME, PASSED, Case, Failed, Record, Records
from benchmarks.kernel_layers import hugging_face
from benchmarks.kernel_tables import goals, line, tables_of
from benchmarks.kernel_timing import COPY, Timed
from benchmarks.kernel_works import Setting, Work
from benchmarks.report import Rows
from fds.kernels import language

PART, AHEAD = "kernels", "compile ahead"
ROUNDS, WAVE = 20, 12  # units that are checked together
CASE_S, AHEAD_S = 240.0, 420.0  # a case alone has to compile for itself, if a run goes on in a new process

_checked: dict[str, Outcome] = {}  # by this process's children


def cases(setting: Setting, *, only: Sequence[str] = (), rounds: int | None = None) -> Iterator[Case]:
    """Yield every piece of work as a case, wave after wave; a wave begins by compiling and checking all of it."""
    rounds = rounds or setting.size(ROUNDS, 3)
    listed = units.in_turn(units.works(units.nowhere(setting), list(only)))
    together = [(unit, list(some)) for unit, some in groupby(listed, lambda work: work.unit)]
    size = setting.size(WAVE, 2)  # where it is to be seen that all runs, the first case is over soon
    for i in range(0, len(together), size):
        wave = together[i : i + size]
        names = [unit for unit, some in wave if not {name_of(work) for work in some} <= setting.done]
        ahead = lambda names=names: compile_ahead(setting, names)
        if names:
            yield Case(f"{AHEAD}: {wave[0][0]} to {wave[-1][0]}", ahead, limit_s=AHEAD_S, again=True)
        for _, some in wave:
            for work in some:
                yield Case(name_of(work), lambda work=work: measure(setting, work, rounds), limit_s=CASE_S)


def name_of(work: Work) -> str:
    """Return the name of the case that times some work."""
    return f"{work.name}, {work.size}"


def compile_ahead(setting: Setting, names: list[str]) -> dict[str, Any]:
    """Check units in child processes, and return what is wrong with whom."""
    left = [name for name in names if name not in _checked]
    _checked.update(units.checked(setting, left, seconds=AHEAD_S / 2))  # the others are checked when they are timed
    wrong = {name: told for name in names if name in _checked and (told := what_is_wrong(_checked[name]))}
    return {"units": len(names), "left for later": [name for name in names if name not in _checked], "wrong": wrong}


def what_is_wrong(outcome: Outcome) -> dict[str, str]:
    """Return by contender what is wrong with it."""
    return {"": outcome.error} if outcome.error else {name: text for name, text in outcome.result.items() if text}


def measure(setting: Setting, listed: Work, rounds: int) -> dict[str, Any]:
    """Time one piece of work; raise `Failed` where fds's own kernel does not do it."""
    if listed.unit not in _checked:
        _checked.update(units.checked(setting, [listed.unit]))
    outcome = _checked[listed.unit]
    if outcome.error:
        raise Failed(outcome.error)
    (work,) = (one for one in units.of_unit(setting, listed.unit) if one.phase == listed.phase)
    clock, failed = units.clock_of(setting.device, setting.tiny), outcome.result
    with units.kernels_of(setting.device), units.compiler():
        if any(text.startswith("OutOfMemoryError") for text in failed.values()):  # beside others; now alone
            skip = {name: text for name, text in failed.items() if not text.startswith("OutOfMemoryError")}
            failed = clock.check(work, skip=skip, tell=lambda name: None)
        timed = clock.time(work, rounds=rounds, failed=failed)
    clock.release()
    if timed.first in timed.failed:
        raise Failed(f"{timed.first}: {timed.failed[timed.first]}", timed.figures())
    return timed.figures()


def timed_of(records: Iterable[Record]) -> tuple[list[Timed], dict[str, str]]:
    """Return what records tell of timed work, and what was not timed at all: name -> why."""
    timed, missing = [], {}
    for record in records:
        if record.figures.get("seconds"):
            timed.append(Timed.of(record.figures))
        elif not record.case.startswith(AHEAD):
            missing[record.case] = "no time left" if record.status == NO_TIME else record.error or record.status
    return timed, missing


def tables(records: list[Record]) -> list[Rows]:
    """Return the tables of all that was recorded, last the goals."""
    return tables_of(*timed_of(records))


def main() -> int:
    """Run from the command line; the exit code says whether all was timed and the goals are met."""
    options, console = parse(), Console(width=200)
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("No GPU here, so nothing is timed and nothing written. What the kernels take of an sm_90:")
        return resources()
    tell = lambda text: console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        records = Records(Path(options.out or folder))
        setting = attrs.evolve(units.setting_of(options.device, options.tiny), done=frozenset(records.done(PART)))
        todo = list(cases(setting, only=options.only, rounds=options.rounds))
        if not todo:
            console.print(f"Nothing is called {', '.join(options.only)}.")
            return 2
        records.begin({"part": PART, **report.machine()})
        run(todo, records, options.seconds, tell)
        timed, missing = timed_of(one for name, one in records.latest(PART).items() if name in {c.name for c in todo})
    report.show_tables(literal(tables_of(timed, missing)), console)
    if options.out and timed:
        path = report.write_tables(tables_of(timed, missing), "kernels", facts(timed), folder=Path(options.out))
        console.print(f"written: {path}")
    return 0 if not missing and all(met for one in timed for *_, met in goals(one)) else 1


def run(todo: list[Case], records: Records, seconds: float, tell) -> None:
    """Run the cases that have not passed in an earlier call, one after another, and record each as it ends."""
    started, done = time.monotonic(), records.done(PART)
    for case in todo:
        took = lambda began: round(time.monotonic() - began, 3)
        if case.name in done and not case.again:
            continue
        if time.monotonic() - started > seconds:
            records.add(Record(PART, case.name, NO_TIME))
            continue
        began = time.monotonic()
        try:
            record = Record(PART, case.name, PASSED, figures=dict(case.run() or {}))
        except Failed as error:
            record = Record(PART, case.name, "failed", figures=error.figures, error=str(error))
        except Exception as error:
            record = Record(PART, case.name, "error", error=f"{type(error).__name__}: {error}")
        record = records.add(Record(PART, case.name, record.status, took(began), record.figures, record.error))
        shown = (
            line(Timed.of(record.figures)) if "seconds" in record.figures else f"{case.name}: {record.error or 'done'}"
        )
        tell(f"{time.monotonic() - started:5.0f} s  {shown}")


def resources() -> int:
    """Print registers, spills and shared memory of every kernel, as compiled for a GPU that is not there."""
    cases = sorted(path.stem for path in (ROOT / "tests/kernels/cases").glob("*.py") if path.stem != "__init__")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.ahead_of_time"]  # one at a time: each shows as it is done
    return max(subprocess.run([*command, case], cwd=ROOT, env=environment).returncode for case in cases)


def literal(tables: list[Rows]) -> list[Rows]:
    """Return tables whose cells rich prints as they are: a peer's error may hold a path in brackets."""
    return [(title, header, [[escape(cell) for cell in row] for row in rows]) for title, header, rows in tables]


def facts(timed: list[Timed]) -> dict[str, str]:
    """Return what ran, for the file."""
    copies = sorted(s for one in timed for s in one.seconds[COPY])
    rounds = len(next(iter(timed[0].seconds.values())))
    speed = timed[0].copied_bytes / copies[len(copies) // 2] / 1e12
    return {
        "what ran": f"{rounds} rounds, in each all contenders of some work and a copy of "
        f"{timed[0].copied_bytes // 2:,} bytes, in turned order; fresh inputs in turn, so that none is in the "
        "second-level cache; times of the device, launches hidden by a wait, but for the transformer layer, which is "
        "called again and again as in a model",
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
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="each of every contender (%(default)s)")
    families = ", ".join(units.FAMILIES)
    parser.add_argument("--only", type=split, default=[], help=f"of {families}, or how a name begins (all)")
    parser.add_argument("--seconds", type=float, default=540, help="after which nothing more is begun (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="5 rounds, nothing kept")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="(%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, which say nothing about speed")
    parser.add_argument("--out", help="where records and tables go, and an earlier call's are (nowhere if not given)")
    options = parser.parse_args()
    options.rounds = min(options.rounds, 5) if options.quick else options.rounds
    options.tiny |= options.device == "cpu"
    return options


if __name__ == "__main__":
    sys.exit(main())
