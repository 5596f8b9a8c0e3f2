"""The command: its options, its checks in order, and its exit code."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from fds.command_line.doctor.finding import Finding, Settings, examine
from fds.command_line.doctor.report import Report
from fds.command_line.parser import Parser

CHECKS = {  # name -> module, and the function of the same name in it; imported one by one, for any import may fail
    "versions": "software",
    "GPUs": "devices",
    "kernels": "kernels",
    "ranks": "ranks",
    "environment": "launcher",
    "network": "network",
    "disk": "disk",
    "host": "host",
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
    for name, module in CHECKS.items():
        report.add(name, examine(lambda settings, module=module: _check(module, settings), settings))
    if options.json:
        print(report.json())
    else:
        report.conclude()
    return 1 if report.problems() else 0


def _check(module: str, settings: Settings) -> Iterator[Finding]:
    yield from getattr(importlib.import_module(f"fds.command_line.doctor.{module}"), module)(settings)
