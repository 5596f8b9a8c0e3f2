"""Break fds on purpose, in one place at a time, and say which test notices it: `python -m tests.mutants`.

A mutant that survives is a fault that nobody would see. The exit code is 1 unless all are killed.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.mutants.mutant import Mutant, all_mutants
from tests.mutants.trying import KILLED, Outcome, try_all

ROOT = Path(__file__).parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Try the mutants that are asked for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutants, or of their files; * stands for anything")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree that is copied and broken (this one)")
    parser.add_argument("--jobs", type=int, default=1, help="how many are tried at once (1)")
    parser.add_argument("--list", action="store_true", help="say what there is, and try nothing")
    args = parser.parse_args(arguments)
    mutants = _chosen(args.names)
    if not mutants:
        parser.error(f"there is no mutant {' or '.join(args.names)}")
    console = Console(soft_wrap=True) if sys.stdout.isatty() else Console(width=200)
    if args.list:
        console.print(_listed(mutants))
        return 0
    done: list[Outcome] = []

    def tell(outcome: Outcome) -> None:
        done.append(outcome)
        name, seconds = outcome.mutant.name, f"{outcome.seconds:.0f} s"
        print(f"{len(done)}/{len(mutants)} {name}: {outcome.verdict} {outcome.by} ({seconds})", flush=True)

    outcomes = try_all(mutants, args.root.resolve(), jobs=args.jobs, tell=tell)
    console.print(_table(outcomes))
    counts = Counter(one.verdict for one in outcomes)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 0 if set(counts) == {KILLED} else 1


def _chosen(names: list[str]) -> list[Mutant]:
    """Return the mutants of these names, or files; all without any."""
    fits = lambda one: any(fnmatch.fnmatch(x, f"{name}*") for name in names for x in (one.name, one.file))
    return [one for one in all_mutants() if not names or fits(one)]


def _listed(mutants: list[Mutant]) -> Table:
    table = Table("mutant", "file", "what breaks", "tests")
    for one in mutants:
        table.add_row(one.name, one.file, one.breaks, one.tests)
    return table


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("mutant", "what breaks", "verdict", "by")
    for one in outcomes:
        table.add_row(one.mutant.name, one.mutant.breaks, one.verdict, one.by)
    return table


if __name__ == "__main__":
    sys.exit(main())
