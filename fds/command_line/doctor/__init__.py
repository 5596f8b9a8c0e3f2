"""`fds doctor`: what this machine has, what of it works, and what to write where it does not."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fds.command_line import Parser, load
from fds.errors import escaped

CHECKS = {  # name -> module and function; imported one by one, for any import may fail
    "versions": "software:software",
    "GPUs": "machine:devices",
    "kernels": "machine:kernels",
    "ranks": "ranks:ranks",
    "environment": "ranks:launcher",
    "network": "machine:network",
    "disk": "machine:disk",
    "host": "machine:host",
}


def fill(parser: Parser) -> None:
    """Give the parser of `fds doctor` its options."""
    parser.teach(
        "Check whether this machine can train: versions, GPUs, kernels, two ranks that meet, environment, network,\n"
        "disk, memory. A finding is ok, a note or a problem, with what to write; if one is a problem, exit with 1.",
        examples={
            "fds doctor": "all of it, some ten seconds",
            "fds doctor --quick": "without starting processes and without writing",
            "fds doctor --dir /scratch/runs": "with the speed of the disk that will hold the saves",
            "fds doctor --json > doctor.json": "for a program, or to attach to a report",
            "fds doctor | grep -v ^ok": "only what needs a look",
            "torchrun --nproc-per-node 2 -m fds doctor --ranks": "the links between these ranks, and nothing else",
        },
        after="Under a launcher (srun -N 2 fds doctor --quick) every node says what it has.\n"
        "docs/command-line.md says what is checked.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="leave out what takes longer than a second: trials, handshake, disk speed"
    )
    parser.add_argument("--dir", type=Path, default=Path(), help="the folder whose disk is measured (this one)")
    parser.add_argument(
        "--ranks", action="store_true", help="measure the links between all ranks that a launcher started, alone"
    )
    parser.add_argument(
        "--limit", type=seconds, default=60.0, help="seconds for that: a rank that has not come by then is named (60)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: checks -> findings with numbers")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.ranks:
        return _run_together(options)
    settings = Settings(options.dir, options.quick)
    report = Report(Console(quiet=options.json))
    for name, place in CHECKS.items():
        report.add(name, examine(lambda settings, place=place: load(f"doctor.{place}")(settings), settings))
    if options.json:
        print(report.json())
    else:
        report.conclude()
    return 1 if report.problems() else 0


def _run_together(options: argparse.Namespace) -> int:
    """Measure the links of this rank with all others; the first reports, and all return the same."""
    measure, findings, table = (load(f"doctor.links:{name}") for name in ("measure", "findings", "table"))
    links, reports = measure(options.limit)
    report = Report(Console(quiet=options.json or not reports))
    report.add("ranks", findings(links))
    if options.json and reports:
        print(report.json())
    report.console.print(table(links), soft_wrap=True, highlight=False)
    report.conclude()
    return int(report.problems() > 0)


def seconds(text: str) -> float:
    """Parse a number of seconds above 0, and below a century. Raises `ArgumentTypeError`."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < 3e9:
        raise argparse.ArgumentTypeError(f"not a number of seconds above 0 and below a century: {text!r}")
    return number


MARKS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "problem": ("✗", "red")}
WIDTH = max(map(len, MARKS))


class Report:
    """Shows the findings of one check after the other, and counts them."""

    def __init__(self, console: Console):
        self.console = console
        self.findings: dict[str, list[Finding]] = {}

    def add(self, name: str, findings: Iterable[Finding]) -> None:
        """Show the findings of a check; in a terminal, a spinner turns until they are there."""
        if self.console.is_terminal and self.console.encoding.startswith("utf"):  # others have no ✓, and no spinner
            with self.console.status(f"{name} ..."):
                self.findings[name] = list(findings)
            self.console.print(_table(name, self.findings[name]))
        else:
            self.findings[name] = list(findings)
            for finding in self.findings[name]:
                self.console.print(_line(name, finding), soft_wrap=True, markup=False, highlight=False)

    def problems(self) -> int:
        """Return the number of problems."""
        return self._count("problem")

    def conclude(self) -> None:
        """Say how many problems and notes there are."""
        problems, notes = self.problems(), self._count("note")
        text = f"{_many(problems, 'problem')}, {_many(notes, 'note')}"
        if problems:
            text += ": what is marked as a problem breaks training, or makes it something else than was meant"
        else:
            text += ": this machine can train"
        self.console.print(text, style="bold red" if problems else "bold green", soft_wrap=True, highlight=False)

    def json(self) -> str:
        """Return all findings as JSON."""
        checks = {name: [attrs.asdict(finding) for finding in findings] for name, findings in self.findings.items()}
        return json.dumps({"problems": self.problems(), "notes": self._count("note"), "checks": checks}, indent=2)

    def _count(self, level: str) -> int:
        return sum(finding.level == level for findings in self.findings.values() for finding in findings)


def _table(name: str, findings: list[Finding]) -> Table:
    table = Table(title=name, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)  # as wide in all tables, so that they stand in line
    table.add_column(style="bold", overflow="fold", min_width=13)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, color = MARKS[finding.level]
        text = Text(escaped(finding.found))
        if finding.advice:
            text.append(f"\n{escaped(finding.advice)}", style="dim" if finding.level == "ok" else color)
        table.add_row(Text(f"  {mark}", style=color), Text(escaped(finding.what)), text)
    return table


def _line(name: str, finding: Finding) -> str:
    advice = f"  ({finding.advice})" if finding.advice else ""
    return escaped(f"{finding.level:<{WIDTH}}  {name:<11}  {finding.what:<13}  {finding.found}{advice}")


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


Level = Literal["ok", "note", "problem"]  # a problem breaks training, or makes it something else than was meant


@attrs.frozen
class Finding:
    """One line of the report.

    Attributes:
        what: the thing: "torch".
        found: what it is: "2.13.0".
        level: whether to do something about it.
        advice: what to do, or why it is as it is; may be empty.
        values: numbers and texts for programs, with units in their names.
    """

    what: str
    found: str
    level: Level = "ok"
    advice: str = ""
    values: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Settings:
    """How to check: the folder whose disk is measured, and whether to leave out what takes longer than a second."""

    dir: Path
    quick: bool


Check = Callable[[Settings], Iterator[Finding]]


def examine(check: Check, settings: Settings) -> Iterator[Finding]:
    """Yield what a check finds. A check that fails is itself a finding: the others go on."""
    try:
        yield from check(settings)
    except Exception as error:
        yield Finding(
            "this check",
            f"failed: {type(error).__name__}: {error}",
            "note",
            "it says nothing about your machine; please report it with this line",
        )


@attrs.frozen
class Ended:
    """How a process ended: its exit code, None where it was killed after the time limit, and what it printed."""

    code: int | None
    out: str
    err: str

    @property
    def reason(self) -> str:
        """Why it failed, in a line: the last one that it printed."""
        last = next((line.strip() for line in reversed(self.err.splitlines()) if line.strip()), "")
        how = f"exit code {self.code}"
        if self.code is None:
            how = "no answer within the time limit"
        elif self.code < 0:
            how = f"ended by {signal.Signals(-self.code).name}"
        return f"{how}: {last}" if last else how


def run_together(
    module: str, environs: Sequence[Mapping[str, str]], *, arguments: str = "", limit: float
) -> list[Ended]:
    """Run a module once per environment, all at the same time, and kill what is left after `limit` seconds.

    A process gets this one's environment without what a launcher set, and the given variables. It finds modules where
    this one does: a `queue.py` in the folder is not Python's.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    command = [sys.executable, "-P", "-c", _PROGRAM.format(path=sys.path, module=module), *arguments.split()]
    with contextlib.ExitStack() as files:
        started = []
        for environ in environs:  # into files, not pipes, which fill up
            out, err = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            started.append((subprocess.Popen(command, env={**inherited, **environ}, stdout=out, stderr=err), out, err))
        codes = _wait([process for process, _, _ in started], limit)
        return [Ended(code, _text(out), _text(err)) for code, (_, out, err) in zip(codes, started, strict=True)]


def _wait(processes: Sequence[subprocess.Popen], limit: float) -> list[int | None]:
    """Return the exit codes of processes, None for those that are killed since the time is over."""
    end = time.monotonic() + limit
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        return [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


_PROGRAM = (
    "import runpy, sys; sys.path[:] = {path!r}; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)
_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    *("OMPI_", "PMI", "MPI_", "SLURM_"),
)
