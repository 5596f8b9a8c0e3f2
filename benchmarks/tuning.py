"""What `fds.tune` predicts of every composition of ten problems beside what it takes, and what the tuner would choose.

    python -m benchmarks.tuning                     # or: make bench-tuning (root for the cables, 40 minutes)
    python -m benchmarks.tuning --only 2 4          # some problems, by their numbers
    python -m benchmarks.tuning --quick             # one small problem, nothing written: does it all run?

Problems differ in model, rows of the batch, ranks (two and four, of gloo), cables between them (three rates; each node
is a core) and memory. The machine's speed drifts within seconds, so all compositions take turns, in rounds: in each one
is trained and rehearsed for a few calls, with a fresh state, in the same processes. What is measured is the mean of the
rounds but the fastest and the slowest, of the slowest rank in each; how far that of the even rounds and that of the odd
ones are from each other says what of an error is the machine's. The tuner then searches with what is known as its
journal, with a tenth of the trials of the sweep.

Claims: seconds are predicted within 5% in the median and 15% at worst, before any trial; bytes within 3% in the median;
the tuner's choice is within 5% of the best of the sweep in nine problems of ten.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]  # as a module and as a file, from anywhere

import attrs
import torch
from gpt.model import gpt  # pyright: ignore[reportMissingImports]
from rich.console import Console

import fds
from benchmarks import cable, ranks, report
from fds import tree
from fds.collectives import worlds
from fds.profiling.peaks import of_second_call
from fds.tuning import Budget, Report, Space, standard
from fds.tuning.footprints import weigh
from fds.tuning.journal import Journal
from fds.tuning.problem import Problem
from fds.tuning.rehearsal import CALLS, ROUNDS, Rehearsal, middle
from fds.tuning.search import name_of
from fds.tuning.spaces import Candidate

SECONDS = 0.05  # of calls that are rehearsed, and of those that are trained, in each round
ADAMW = functools.partial(fds.adamw, 1e-3)


@attrs.frozen
class Case:
    """A GPT, the batch of a step, and the ranks that train it."""

    width: int
    layers: int
    rows: int
    context: int
    ranks: int = 2
    over: str = ""  # the rate of a cable, half of the ranks at each end; none: all on this machine
    memory: float = 1.0  # of what the candidate that holds most holds: what a rank may

    def problem(self) -> Problem:
        """Return what is tuned."""
        loss = gpt(width=self.width, layers=self.layers, heads=4)
        draws = torch.Generator().manual_seed(0)
        tokens = torch.randint(256, (self.rows, self.context + 1), generator=draws)
        return Problem(self.space(), loss, loss.init, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))

    def space(self) -> Space:
        """Return ten compositions, or eleven."""
        sizes = {"microbatches": (1, 4), "pipelines": (1, 2) if self.ranks == 2 else (1, 2, 4)}
        everything = standard(ADAMW, self.ranks, **sizes)
        return attrs.evolve(everything, allows=_Allows(everything.allows))

    def __str__(self) -> str:
        where = f"a cable of {self.over}" if self.over else "one machine"
        model = f"width {self.width}, {self.layers} layers, {self.rows} x {self.context} bytes"
        limit = "" if self.memory == 1.0 else f", memory {self.memory:.0%}"
        return f"{self.ranks} ranks, {where}, {model}{limit}"


@attrs.frozen
class _Allows:
    """Recomputation in pipelines alone; of them one stage of ZeRO, and no single microbatch that others wait for."""

    before: Any

    def __call__(self, axes: Mapping[str, int], choices: Mapping[str, Any]) -> bool:
        piped = choices["stage"] == 0 and choices["microbatches"] > 1
        return self.before(axes, choices) and (piped if "pp" in axes else not choices["recompute"])


CASES = (
    Case(256, 4, 16, 64),
    Case(128, 8, 32, 64),
    Case(384, 2, 8, 64, memory=0.6),
    Case(128, 4, 32, 64, ranks=4),
    Case(256, 4, 16, 32, ranks=4, memory=0.7),
    Case(128, 4, 16, 64, over="1gbit"),
    Case(256, 2, 16, 64, over="1gbit", memory=0.7),
    Case(128, 4, 32, 64, over="300mbit"),
    Case(128, 4, 32, 32, over="100mbit"),
    Case(128, 4, 16, 64, ranks=4, over="300mbit"),
)
QUICK = Case(32, 2, 8, 16)


@attrs.frozen
class Measured:
    """What was found of a composition; of what was refused or failed, the text."""

    candidate: Candidate
    footprint: Any
    rehearsal: Any = ""
    trial: tuple[float, int] | None = None
    apart: float = 0.0  # the seconds of odd rounds beside those of even rounds, relative to these

    @property
    def error(self) -> float:
        """How far the seconds that were predicted are from those that were measured, relative to these."""
        assert self.trial is not None
        return sum(self.rehearsal) / self.trial[0] - 1

    @property
    def error_of_bytes(self) -> float:
        """How far the bytes that were predicted are from those that were measured, relative to these."""
        assert self.trial is not None
        return self.footprint["num_bytes"] / self.trial[1] - 1


def sweep(case: Case, seconds: float, few: int | None = None, rounds: int = ROUNDS) -> list[Measured]:
    """Weigh, rehearse and train all compositions, in turns, on all ranks; return what came of each."""
    fds.init_distributed()
    everyone = fds.mesh(ranks=-1)["ranks"]
    if case.over:  # each node is a core
        cores = sorted(os.sched_getaffinity(0))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {cores[everyone.index * 2 // everyone.size % len(cores)]})
    problem = case.problem()
    candidates = problem.space.candidates()[:few]
    weighed = list[Any]()
    weigh(weighed.append, problem, candidates)
    footprints = [
        next(x for x in answers if x is not None) for answers in zip(*everyone.exchange(weighed), strict=True)
    ]
    if refused := [footprint for footprint in footprints if isinstance(footprint, str)]:
        raise RuntimeError(f"compositions of the benchmark are refused: {refused}")
    trainings = [Training.of(problem, candidate) for candidate in candidates]
    rehearsal = Rehearsal(problem, candidates, seconds)
    for turn in range(rounds):
        for i in rehearsal.order(turn):
            trainings[i].visit(seconds)
            rehearsal.visit(i)
    rehearsed = rehearsal.answers()
    return [
        Measured(*row[:3], row[3].trial(), row[3].apart())
        for row in zip(candidates, footprints, rehearsed, trainings, strict=True)
    ]


@attrs.define
class Training:
    """A composition that is trained in rounds."""

    problem: Problem
    step: Any
    share: Any
    everyone: Any
    rounds: list[float] = attrs.field(factory=list)
    num_bytes: int = 0  # at the peak of a call, of the rank that holds most

    @classmethod
    def of(cls, problem: Problem, candidate: Candidate) -> Training:
        """Compose it."""
        mesh = fds.mesh(**candidate.axes)
        return cls(problem, problem.step(candidate, mesh), problem.share(candidate, mesh), mesh[tuple(candidate.axes)])

    def visit(self, seconds: float) -> None:
        """Train some calls with a fresh state, and note what one takes on the slowest rank; at first also its bytes."""
        if not self.rounds:
            for link in worlds.of_torch().links.values():  # what gloo received into before is not this one's
                link.scratch.free.clear()  # pyright: ignore[reportAttributeAccessIssue]  (gloo's)
            of_rank = sum(of_second_call(self.step, self.problem.init(self.step), self.share).values())
            self.num_bytes = max(self.everyone.exchange(of_rank))
        state, metrics = self.problem.init(self.step), None

        def run(calls: int) -> float:
            nonlocal state, metrics
            begin = time.perf_counter()
            for _ in range(calls):
                state, metrics = self.step(state, self.share)
                tree.values_of(metrics["loss"])
            return (time.perf_counter() - begin) / calls

        once = run(1)  # which warms caches
        least, most = CALLS
        calls = max(self.everyone.exchange(min(max(least, math.ceil(seconds / once)), most)))
        self.rounds.append(max(self.everyone.exchange(run(calls))))

    def trial(self) -> tuple[float, int]:
        """Return the seconds of a call, and bytes."""
        return middle(self.rounds), self.num_bytes

    def apart(self) -> float:
        """Return how far odd rounds are from even ones."""
        return middle(self.rounds[1::2]) / middle(self.rounds[::2]) - 1


@attrs.frozen
class Choice:
    """What the tuner's search chose, and what the sweep says of it."""

    trials: int
    allowed: int
    seconds: float  # of the candidate that was chosen, as the sweep measured it
    best: float  # of all that fit

    @property
    def late(self) -> float:
        """How much longer a step takes than the best one's."""
        return self.seconds / self.best - 1


def choose(case: Case, rows: Sequence[Measured]) -> Choice:
    """Let the tuner search with a tenth of the trials, rounded up, and what is known for a journal."""
    ran = [row for row in rows if row.trial is not None]
    most = max(row.footprint["num_bytes"] for row in ran)
    memory = math.ceil(case.memory * most)
    fits = [row for row in ran if row.footprint["num_bytes"] <= memory]
    problem, trials = case.problem(), math.ceil(len(fits) / 10)
    if len(rows) < len(problem.space.candidates()):
        known = {row.candidate.key for row in rows}
        space = attrs.evolve(problem.space, allows=lambda axes, choices: Candidate(axes, choices).key in known)
        problem = attrs.evolve(problem, space=space)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        journal = Journal(path, name_of(problem))
        for row in rows:
            key = row.candidate.key
            journal[f"weigh {key}"], journal[f"rehearse {key}"] = row.footprint, row.rehearsal
            journal[f"try {key}"] = ["done", "", row.trial]
        of = {"space": problem.space, "budget": Budget(trials=trials), "memory": memory, "journal": path, "show": None}
        found: Report = fds.tune(problem.loss, problem.params, problem.batch, **of)
    assert found.best.measured is not None
    return Choice(trials, len(fits), found.best.measured, min(row.trial[0] for row in fits if row.trial))


def main() -> int:
    """Run from the command line; the exit code says whether everything ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three compositions of a small problem, nothing written")
    parser.add_argument("--only", type=int, nargs="+", default=range(1, len(CASES) + 1), help="numbers of problems")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of calls that are timed, five times over")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="where the table goes (benchmarks/results)")
    options = parser.parse_args()
    console = Console()
    ranks.prepare(["benchmarks.tuning"])
    cases = {0: QUICK} if options.quick else {number: CASES[number - 1] for number in options.only}
    why, sweeps = cable.missing(), dict[int, list[Measured]]()
    for number, case in cases.items():
        if case.over and why:
            console.print(f"problem {number} is left out, without a cable: {why}")
            continue
        console.print(f"[dim]problem {number}: {case}[/]")
        few, seconds = (3, 0.01) if options.quick else (None, options.seconds)
        sweeps[number] = ranks.launch(sweep, case, seconds, few, num_ranks=case.ranks, over=case.over)[0]
    tables = [summary({n: cases[n] for n in sweeps}, sweeps)]
    tables += [details(f"Problem {number}: {cases[number]}", rows) for number, rows in sweeps.items()]
    report.show_tables(tables, console)
    if not options.quick:
        facts = {"what ran": "GPTs of examples/train_gpt.py on ranks of gloo, every composition of ten spaces"}
        console.print(f"written: {report.write_tables(tables, 'tuning', facts, folder=options.out)}")
    return 0


def summary(cases: Mapping[int, Case], sweeps: Mapping[int, Sequence[Measured]]) -> report.Rows:
    """Return a row for each problem, and what all of them come to."""
    head = [
        "contender",
        "compositions",
        "seconds, median",
        "worst",
        "measured anew (A/A), median",
        "worst",
        "bytes, median",
        "trials",
        "the choice, behind the best",
    ]
    table, everything, lates = list[list[str]](), list[Measured](), list[float]()
    for number, rows in sweeps.items():
        ran, choice = [row for row in rows if row.trial], choose(cases[number], rows)
        everything += ran
        lates.append(choice.late)
        trials = f"{choice.trials} of {choice.allowed}"
        table.append([f"{number}: {cases[number]}", f"{len(ran)}", *_errors(ran), trials, f"{choice.late:.1%}"])
    good = sum(late <= 0.05 for late in lates)
    table.append(["all", f"{len(everything)}", *_errors(everything), "", f"{good} of {len(lates)} within 5%"])
    return "What was predicted before any trial, and what the tuner chose", head, table


def _errors(rows: Sequence[Measured]) -> list[str]:
    seconds, num_bytes = [abs(row.error) for row in rows], [abs(row.error_of_bytes) for row in rows]
    apart = [abs(row.apart) for row in rows]
    of = [statistics.median(seconds), max(seconds), statistics.median(apart), max(apart), statistics.median(num_bytes)]
    return [f"{x:.1%}" for x in of]


def details(title: str, rows: Sequence[Measured]) -> report.Rows:
    """Return a row for each composition, the fastest first."""
    head = ["contender", "computed ms", "messages ms", "predicted ms", "measured ms", "error", "anew", "MB", "error"]
    table = list[list[str]]()
    for row in sorted((row for row in rows if row.trial), key=lambda row: row.trial or (0.0, 0)):
        assert row.trial is not None
        computed, messages = row.rehearsal
        times = [f"{1e3 * seconds:.1f}" for seconds in (computed, messages, computed + messages, row.trial[0])]
        weight = [f"{row.trial[1] / 1e6:.2f}", f"{row.error_of_bytes:+.1%}"]
        table.append([str(row.candidate), *times, f"{row.error:+.1%}", f"{row.apart:+.1%}", *weight])
    return title, head, table


if __name__ == "__main__":
    sys.exit(main())
