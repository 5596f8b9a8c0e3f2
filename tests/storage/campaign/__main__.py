"""Run the fault campaign: `make faults`, or `python -m tests.storage.campaign --seed 3 --kills 500`.

Kills, errors at every request, real full disks, files that were tampered with, ranks that stop, are interrupted, are
missing, come twice, compose something else or pass another batch. Prints a table, and ends with 1 at the
first thing that did not hold, with the seed to repeat it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.storage.campaign import batches, disks, errors, kills, ranks, steps
from tests.storage.campaign.outcomes import Row, Violation

ROOT = Path(__file__).parents[3]


def killed(root: Path, seed: int, num_kills: int) -> Iterator[Row]:
    """Kill so often, in scenarios by turns; a few kills come to some of them, drawn by the seed."""
    scenarios = kills.all_scenarios()
    draw = random.Random(seed)
    order = draw.sample(scenarios, len(scenarios))
    for i, scenario in enumerate(order):
        rounds = num_kills // len(order) + (i < num_kills % len(order))
        if rounds:
            yield kills.kill(root / "kills", scenario, rounds, seed)


def killed_steps(root: Path, seed: int, num_kills: int) -> Iterator[Row]:
    """Kill runs whose state lives on a disk, as often in each scenario."""
    for scenario in (scenarios := steps.all_scenarios()):
        yield steps.kill(root / "steps", scenario, -(-num_kills // len(scenarios)), seed)


def failed(root: Path) -> Iterator[Row]:
    """Let every request fail, and writes come out short."""
    for scenario in errors.all_scenarios():
        yield errors.fail(root / "errors", scenario)
    yield errors.shorten(root / "short")


def on_disks(root: Path) -> Iterator[Row]:
    """Save onto disks that are full, where this user may mount one."""
    root.mkdir()
    mount = [*disks.NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", str(root)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        yield Row("full and read-only disks: this user may not mount one", 0, {})
        return
    for told in _program([*disks.NAMESPACE, sys.executable, "-m", "tests.storage.campaign.disks", str(root)]):
        yield Row(*told)


def tampered(root: Path, seed: int, num_inputs: int) -> Iterator[Row]:
    """Read files that were tampered with, in a process with little memory."""
    root.mkdir()
    for name, count, outcomes, slowest in _program(
        [sys.executable, "-m", "tests.storage.campaign.fuzz", str(root), str(seed), str(num_inputs)]
    ):
        yield Row(f"tampered {name.replace('_', ' ')}, the slowest in {slowest} s", count, outcomes)


def _program(command: list[str]) -> list[list]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise Violation(f"{' '.join(command)}\n{done.stdout}{done.stderr[-8000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def main() -> int:
    """Run it all, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.storage.campaign", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the instants and the inputs (the time)")
    parser.add_argument("--kills", type=int, default=240, help="how many (%(default)s)")
    parser.add_argument("--inputs", type=int, default=12_000, help="files that were tampered with (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seed {options.seed}", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="faults", dir=os.environ.get("TMPDIR")) as folder:
        root = Path(folder)
        try:
            for part in (
                killed(root, options.seed, options.kills),
                killed_steps(root, options.seed, options.kills // 4),
                failed(root),
                on_disks(root / "disks"),
                tampered(root / "fuzz", options.seed, options.inputs),
                ranks.all_rows(root / "ranks"),
                (run() for run in (batches.simulated, batches.real)),
            ):
                for row in part:
                    rows.append(row)
                    print(f"{row.scenario}: {row.count} {row.outcomes}", flush=True)
        except Violation as violation:
            print(f"did not hold, with --seed {options.seed}: {violation}", file=sys.stderr)
            return 1
    table = Table("scenario", "count", "outcomes")
    for row in rows:
        outcomes = ", ".join(f"{count} {what}" for what, count in sorted(row.outcomes.items()))
        table.add_row(row.scenario, str(row.count), outcomes)
    Console(width=120).print(table)
    print(f"{sum(row.count for row in rows if row.scenario.startswith('kill'))} kills, seed {options.seed}: all held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
