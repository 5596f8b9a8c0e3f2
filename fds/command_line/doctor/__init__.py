"""`fds doctor`: what this machine has, what of it works, and what to write where it does not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fds.command_line import Parser, load
from fds.command_line.doctor.check import Finding, Settings, examine
from fds.errors import escaped

CHECKS = {  # name -> module and function; imported one by one, for any import may fail
    "versions": "software:software",
    "GPUs": "machine:devices",
    "kernels": "kernels:kernels",
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
        },
        after="Under a launcher (srun -N 2 fds doctor --quick) every node says what it has.\n"
        "docs/command-line.md says what is checked.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="leave out what takes longer than a second: trials, handshake, disk speed"
    )
    parser.add_argument("--dir", type=Path, default=Path(), help="the folder whose disk is measured (this one)")
    parser.add_argument("--json", action="store_true", help="print JSON: checks -> findings with numbers")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    settings = Settings(options.dir, options.quick)
    report = Report(Console(quiet=options.json))
    for name, place in CHECKS.items():
        report.add(name, examine(lambda settings, place=place: load(f"doctor.{place}")(settings), settings))
    if options.json:
        print(report.json())
    else:
        report.conclude()
    return 1 if report.problems() else 0


MARKS = {"ok": ("✓", "green"), "note": ("!", "yellow"), "problem": ("✗", "red")}
WIDTH = max(map(len, MARKS))


class Report:
    """Shows the findings of one check after the other, and counts them."""

    def __init__(self, console: Console):
        self.console = console
        self.found: dict[str, list[Finding]] = {}

    def add(self, name: str, findings: Iterable[Finding]) -> None:
        """Show the findings of a check; in a terminal, a spinner turns until they are there."""
        if self.console.is_terminal and self.console.encoding.startswith("utf"):  # others have no ✓, and no spinner
            with self.console.status(f"{name} ..."):
                self.found[name] = list(findings)
            self.console.print(_table(name, self.found[name]))
        else:
            self.found[name] = list(findings)
            for finding in self.found[name]:
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
        checks = {name: [attrs.asdict(finding) for finding in findings] for name, findings in self.found.items()}
        return json.dumps({"problems": self.problems(), "notes": self._count("note"), "checks": checks}, indent=2)

    def _count(self, level: str) -> int:
        return sum(finding.level == level for findings in self.found.values() for finding in findings)


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
