"""Kills: SIGKILL of processes that save, at random instants; what loads afterwards was reached, and is not too old."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import attrs
import torch

import fds
from fds import tree
from fds.errors import StorageError
from fds.storage.disk.folders import tags
from tests.storage.campaign.outcomes import Row, Violation
from tests.storage.killing import in_a_child
from tests.storage.killing_ranks import check, ends, make_step, state_at, two_ranks

WIDTHS = {"small": 40, "large": 3_000_000}  # 24 MB of state: three blocks of one file, two of each of two
SAVES = 6  # that go on after a helper process was killed
REFUSED = 8  # exit status of a rank that was told by a StorageError
HOWS = {"save": ["process"], "save_async": ["process", "helper"]}


@attrs.frozen
class Scenario:
    """Who saves how, and who is killed."""

    ranks: int
    how: str  # "save" or "save_async"
    victim: str  # "process", or the "helper" process of a save_async
    width: str
    anew: bool  # new tags, of which two are kept, or one again and again

    def __str__(self) -> str:
        told = "new tags, keep=2" if self.anew else "one tag"
        return f"kill {self.victim}: {self.how}, {self.ranks} rank{'s' * (self.ranks > 1)}, {self.width}, {told}"

    def save(self, dir: Path, step: fds.Step, calls: int, state: fds.State | None = None, how: str = "") -> None:
        """Save a state that tells its calls, whole; one like `state` if it is given."""
        state = state_at(step, calls, WIDTHS[self.width]) if state is None else counted(state, calls)
        tag, keep = (None, 2) if self.anew else ("best", None)
        if (how or self.how) == "save":
            fds.save(dir, state, step, tag, {"calls": calls}, keep=keep)
        else:
            fds.save_async(dir, state, step, tag, {"calls": calls}, keep=keep).wait()

    def start(self, dir: Path, last: int, told: int) -> list[int]:
        """Start ranks that save for ever, or until a helper's death is long past; return their process ids."""

        def body(rank: int, step: fds.Step) -> None:
            state = state_at(step, 0, WIDTHS[self.width])
            for calls in itertools.count(last + 1) if self.victim == "process" else range(last + 1, last + 1 + SAVES):
                try:
                    self.save(dir, step, calls, state)
                except StorageError:
                    if self.victim == "process":
                        os._exit(REFUSED)
                else:
                    os.write(told, (calls * 2 + rank).to_bytes(8, "little"))

        if self.ranks == 1:
            return [in_a_child(lambda: body(0, make_step()))]
        return two_ranks(dir.parent / "meeting", body)


def counted(state: fds.State, calls: int) -> fds.State:
    """Return a state like this one, whose every element says at which call it was reached."""
    return tree.map(lambda x: torch.full_like(x, calls) if x.dtype != torch.int64 or not x.dim() else x, state)


def all_scenarios() -> list[Scenario]:
    """Return every scenario."""
    return [
        Scenario(ranks, how, victim, width, anew)
        for how, victims in HOWS.items()
        for victim in victims
        for ranks, width, anew in itertools.product((1, 2), WIDTHS, (False, True))
    ]


def kill(root: Path, scenario: Scenario, rounds: int, seed: int) -> Row:
    """Kill `rounds` times, and return what came of it. Raises `Violation`."""
    draw, dir, last, found = random.Random(f"{seed} {scenario}"), root / "run", 1, Counter[str]()
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    scenario.save(dir, make_step(), last, how="save")  # which starts no process and no thread: this one forks
    for number in range(rounds):
        with Violation.told(f"{scenario}, round {number}, seed {seed}"):
            last = _round(dir, scenario, draw, last, found)
    with Violation.told(f"{scenario}, the save after all kills, seed {seed}"):
        scenario.save(dir, make_step(), last + 1, how="save")
        check(dir, last + 1, last + 1, WIDTHS[scenario.width])
        left = sorted({*os.listdir(dir)} - {".lock", "latest", *tags(dir)})
        assert not left, f"{left} is left"
        assert len(tags(dir)) <= (2 if scenario.anew else 1), tags(dir)
    shutil.rmtree(root)
    return Row(str(scenario), rounds, dict(found))


def _round(dir: Path, scenario: Scenario, draw: random.Random, last: int, found: Counter[str]) -> int:
    """Kill once, and return the calls of the save that is found. Raises `AssertionError`."""
    read, told = os.pipe()
    started = time.monotonic()
    pids = scenario.start(dir, last, told)
    os.close(told)
    with open(read, "rb") as reader:
        message = reader.read(8)  # by now everyone is there
        time.sleep(draw.uniform(0, min(time.monotonic() - started, 0.3)))
        victim = draw.randrange(scenario.ranks)
        helpers = children(pids[victim])
        if scenario.victim == "process":
            os.kill(pids[victim], signal.SIGKILL)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(helpers), signal.SIGKILL) if helpers else None
        statuses = ends(pids)
        message += reader.read()
    returned = [int.from_bytes(message[i : i + 8], "little") // 2 for i in range(0, len(message), 8)]
    at_least = max(returned, default=last)
    if scenario.victim == "process":
        assert gone(helpers), "the process that wrote for the victim lives on"
        survivors = [status for i, status in enumerate(statuses) if i != victim]
        assert statuses[victim] == -signal.SIGKILL, f"the victim ended with {statuses[victim]}"
        assert all(status in (7, REFUSED) for status in survivors), f"the survivor ended with {survivors}"
        at_most = at_least + 1
        found.update(f"survivor {'RankError' if status == 7 else 'StorageError'}" for status in survivors)
    else:
        assert statuses == [0] * scenario.ranks, f"ranks whose helper was killed ended with {statuses}"
        refused = SAVES - len({*returned})
        assert refused <= 1, f"{refused} saves failed for one helper that was killed"
        assert last + SAVES in returned or last + SAVES - 1 in returned, returned
        at_most = last + SAVES
        found["StorageError" if refused else "no error"] += 1
    calls = check(dir, at_least, at_most, WIDTHS[scenario.width])
    found["new" if calls == at_least + 1 else "last"] += 1
    present = tags(dir)
    assert len(present) <= (3 if scenario.anew else 1), f"{present} are kept"
    for tag in present:
        state, extra = fds.load(dir, make_step(), state_at(make_step(), 0, WIDTHS[scenario.width]).params, tag=tag)
        assert extra == {"calls": int(state.calls)}
        assert not scenario.anew or tag == f"step{int(state.calls):08d}", (tag, extra)
    assert not scenario.anew or calls < 3 or len(present) >= 2, f"only {present} are left of two to keep"
    return calls


def gone(pids: list[int]) -> bool:
    """Return whether these processes end within some seconds."""
    until = time.monotonic() + 10.0
    while any(_state(pid) not in "ZX" for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)
    return time.monotonic() < until


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and that are there."""
    running = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [one for one in running if _stat(one)[1] == str(pid) and _state(one) not in "ZX"]


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _stat(pid: int) -> list[str]:
    """Return state and parent of a process, of one that is gone the state X."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return ["X", ""]
