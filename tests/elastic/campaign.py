"""Lose and add ranks at random, on real processes: `make resizing`, or `python -m tests.elastic.campaign --seed 3`.

Jobs of torchrun's agents, from one to four nodes with a rank each, in every composition of `tests.elastic.job`. An
event kills a rank, takes a node away with its memory, asks one to leave, lets a rank hang, or adds a node. After each
one the ranks that are left must train again within a limit; at the end every call's loss and learning rate must be
those of the run that nothing disturbed. Prints a table, and ends with 1 at the first thing that did not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

import fds
from tests.elastic import agents, job

LIMIT = 120.0  # seconds from an event until ranks train again: a hang takes its time limit, and 30 s until SIGKILL
CALLS, PAUSE = 600, 0.5


class Violation(Exception):
    """Something that did not hold."""


@attrs.define
class Row:
    """What a job of one composition has been through."""

    kind: str
    events: list[tuple[str, float]] = attrs.field(factory=list)  # and the seconds until ranks trained again
    sources: dict[str, int] = attrs.field(factory=dict)  # of the states that starts went on from
    lost: list[float] = attrs.field(factory=list)
    goodput: float = 1.0
    revived: int = 0  # of torchrun's agents

    def __str__(self) -> str:
        waits = sorted(seconds for _, seconds in self.events)
        lost = sorted(self.lost)
        names = [name for name, _ in self.events]
        each = ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
        sources = ", ".join(f"{count} {name}" for name, count in sorted(self.sources.items()))
        middle = f"{lost[len(lost) // 2]:.1f}, {lost[-1]:.1f}" if lost else ""
        ends = f"{waits[-1]:.1f} | {self.revived} | {100 * self.goodput:.0f}%"
        return f"| {self.kind} | {len(names)}: {each} | {sources} | {middle} | {ends} |"


HEAD = (
    "| composition | events | went on from | seconds lost: median, most | trained within | agents ended | goodput |\n"
    "|---|---|---|---|---|---|---|"
)


def events(draw: random.Random, nodes: agents.Nodes) -> Iterator[str]:
    """Yield events that the nodes may go through, drawn at random; the number of nodes stays between 1 and 4."""
    while True:
        count = len(nodes.nodes)
        choices = (
            ["kill"] * 3 + ["hang"] * (count > 1) + ["lose", "leave"] * 2 * (count > 1) + ["join"] * 4 * (count < 4)
        )
        yield draw.choice(choices)


def happen(event: str, draw: random.Random, nodes: agents.Nodes) -> None:
    """Let an event happen to a node that is drawn."""
    name = draw.choice(sorted(nodes.nodes))
    match event:
        case "kill":
            nodes.lose_rank(name)
        case "hang":
            nodes.lose_rank(name, signal.SIGSTOP)
        case "lose":
            nodes.lose(name)
        case "leave":
            nodes.leave(name)
        case "join":
            nodes.join()


def resize(root: Path, kind: str, count: int, draw: random.Random) -> Row:
    """Let so many events happen to a job. Raises `Violation`."""
    row = Row(kind)
    with agents.nodes(root, kind, CALLS, PAUSE) as nodes:
        begun = time.time()
        for _ in range(draw.randint(2, 4)):
            nodes.join()
        if not nodes.wait(lambda rows: agents.trains(rows, begun, len(nodes.nodes)), LIMIT):
            raise Violation(f"{kind}: the job did not start\n{nodes.texts()}")
        for event, _ in zip(events(draw, nodes), range(count), strict=False):
            time.sleep(draw.uniform(0, 3))
            at = time.time()
            happen(event, draw, nodes)
            if not nodes.wait(lambda rows, at=at: agents.trains(rows, at, len(nodes.nodes)), LIMIT):
                raise Violation(f"{kind}: after {event} no ranks trained within {LIMIT:g} s\n{nodes.texts()}")
            row.events.append((event, time.time() - at))
            print(f"  {kind}: {event}, {row.events[-1][1]:.1f} s, now {len(nodes.nodes)} ranks", flush=True)
        if not nodes.ended(LIMIT + CALLS):
            raise Violation(f"{kind}: the job did not end well\n{nodes.texts()}")
        rows, row.revived = nodes.rows(), nodes.revived
    try:
        agents.check(rows, kind, CALLS)
    except AssertionError as error:
        raise Violation(f"{kind}: another loss than that of the undisturbed run: {error}") from error
    history = fds.elastic.read_history(nodes.directory)
    for start in history.starts[1:]:
        row.sources[start.source] = row.sources.get(start.source, 0) + 1
        row.lost.append(start.lost_seconds)
    row.goodput = history.goodput
    return row


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10_000)
    parser.add_argument("--events", type=int, default=60)
    parser.add_argument("--kinds", nargs="+", default=list(job.KINDS), choices=job.KINDS)
    options = parser.parse_args()
    print(f"seed {options.seed}, load {os.getloadavg()[0]:.1f}", flush=True)
    rows = []
    for i, kind in enumerate(options.kinds):
        count = options.events // len(options.kinds) + (i < options.events % len(options.kinds))
        with tempfile.TemporaryDirectory() as root:
            try:
                rows.append(resize(Path(root), kind, count, random.Random(f"{options.seed} {kind}")))
            except Violation as violation:
                print(f"seed {options.seed}: {violation}", file=sys.stderr)
                sys.exit(1)
        print(rows[-1], flush=True)
    lost = sorted(seconds for row in rows for seconds in row.lost)
    print(f"\nseed {options.seed}, load {os.getloadavg()[0]:.1f} at the end\n\n{HEAD}", *rows, sep="\n")
    print(
        f"\n{sum(len(row.events) for row in rows)} events, {len(lost)} starts again; {lost[len(lost) // 2]:.1f} s lost"
    )


if __name__ == "__main__":
    main()
