"""Run as a program: two real ranks save together, and one is killed, in each state of the disk and at random instants.

Prints one line a scenario, `NAME: K kills, last saves L`; exits with an error if the other rank hangs or says nothing,
or if the last save then does not load, is no state that was reached, or is older than one that returned.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

import fds
from fds import tree
from fds.errors import RankError
from fds.storage.disk.folders import tags
from tests.storage.faults import at_request
from tests.storage.killing import die, in_a_child

CHANGES = ("create", "pwrite", "ftruncate", "rename", "replace", "unlink", "rmdir")  # of what lies on the disk
ROUNDS = 2
TIMEOUT = 30.0  # seconds that a rank waits for another: more than a survivor ever needs


def make_step(*sharding) -> fds.Step:
    return fds.compose(*sharding, fds.sgd(0.1, momentum=0.9))(lambda params, batch: params["w"].sum() * batch)


def state_at(step: fds.Step, calls: int, width: int) -> fds.State:
    """Return a state whose every element says at which call it was reached."""
    state = step.init({"w": torch.zeros(width), "b": torch.zeros(3)})
    return tree.map(lambda x: torch.full_like(x, calls) if x.dtype != torch.int64 or not x.dim() else x, state)


def check(dir: Path, at_least: int, at_most: int, width: int, *, local: bool = False) -> int:
    step = make_step()
    state, extra = fds.load(dir, step, {"w": torch.zeros(width), "b": torch.zeros(3)}, local=local)
    calls = int(state.calls)
    assert extra == {"calls": calls} and at_least <= calls <= at_most, (calls, at_least, at_most)
    assert all(bool((x == calls).all()) for name, x in tree.paths(state).items() if name != "key")
    return calls


def two_ranks(meeting: Path, body: Callable[[int, fds.Step], None]) -> list[int]:
    """Fork two ranks that call `body(rank, step)`; return their process ids."""
    meeting.unlink(missing_ok=True)

    def join(rank: int) -> None:
        fds.init_distributed("gloo", rank=rank, world_size=2, init_method=f"file://{meeting}", timeout=TIMEOUT)
        try:
            body(rank, make_step(fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=1)))
        except RankError:
            os._exit(7)  # the other one was lost, and this one knows

    return [in_a_child(lambda rank=rank: join(rank)) for rank in range(2)]


def ends(pids: list[int]) -> list[int]:
    """Return exit statuses, negative for signals; the killing of one must not hang the other."""
    started = time.monotonic()
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert time.monotonic() - started < TIMEOUT - 5, "the survivor waited for its timeout"
    return statuses


def save(dir: Path, step: fds.Step, calls: int, tag: str | None, width: int) -> None:
    fds.save(dir, state_at(step, calls, width), step, tag, {"calls": calls})


def moments(root: Path, victim: int, body: Callable[[int, fds.Step], None]) -> list[int]:
    """Return the requests of a rank at which it is killed: the first of each run of changes of one kind, and its last.

    One rank alone is killed at every request, in killing.py.
    """

    def count(rank: int, step: fds.Step) -> None:
        with at_request(-1, die) as made:
            body(rank, step)
        if rank == victim:
            (root / "requests").write_text(" ".join(made))

    assert ends(two_ranks(root / "meeting", count)) == [0, 0]
    made = (root / "requests").read_text().split()
    changes = [(i, name) for i, name in enumerate(made) if name in CHANGES]
    return [i for (_, before), (i, name) in itertools.pairwise(changes) if name != before] + [len(made) - 1]


def killed_at(root: Path, victim: int, n: int, body: Callable[[int, fds.Step], None]) -> None:
    """Kill a rank at its request `n`; the other one is told, or had nothing more to wait for."""

    def until_then(rank: int, step: fds.Step) -> None:
        with at_request(n, die) if rank == victim else contextlib.nullcontext():
            body(rank, step)

    statuses = ends(two_ranks(root / "meeting", until_then))
    assert statuses[victim] == -signal.SIGKILL and statuses[1 - victim] in (0, 7), statuses


def at_requests(root: Path, victim: int, tag: str | None) -> None:
    dir, found = root / "run", []
    first = make_step()

    def body(rank: int, step: fds.Step) -> None:
        save(dir, step, 2, tag, 40)

    save(dir, first, 1, tag, 40)
    for n in moments(root, victim, body):
        shutil.rmtree(dir)
        save(dir, first, 1, tag, 40)
        killed_at(root, victim, n, body)
        found.append(check(dir, 1, 2, 40))
        save(dir, first, 3, tag, 40)
        check(dir, 3, 3, 40)
        assert not (dir / ".saving").exists()
    assert 1 in found and (victim == 1 or 2 in found), found
    print(f"rank {victim} at its requests, tag {tag}: {len(found)} kills, last saves {found}", flush=True)


def local_at_requests(root: Path, victim: int) -> None:
    """Each rank has a directory of its own and keeps one save; the last one is the last that both have."""
    dir, found = root / "local", []

    def saves(calls: int) -> Callable[[int, fds.Step], None]:
        state = lambda step: state_at(step, calls, 40)
        return lambda rank, step: fds.save(dir, state(step), step, None, {"calls": calls}, keep=1, local=True)

    assert ends(two_ranks(root / "meeting", saves(1))) == [0, 0]
    check(dir, 1, 1, 40, local=True)  # processes that are forked from here go on with this run
    for n in moments(root, victim, saves(2))[victim::2]:  # both do the same, so each is killed at every second of them
        shutil.rmtree(dir)
        assert ends(two_ranks(root / "meeting", saves(1))) == [0, 0]
        killed_at(root, victim, n, saves(2))
        found.append(check(dir, 1, 2, 40, local=True))
        assert ends(two_ranks(root / "meeting", saves(3))) == [0, 0] and check(dir, 3, 3, 40, local=True) == 3
        assert [tags(dir / f"rank{i}") for i in range(2)] == [["step00000003"]] * 2
    assert 1 in found and 2 in found, found
    print(f"rank {victim} at its requests, local: {len(found)} kills, last saves {found}", flush=True)


def at_random_instants(root: Path, rounds: int, width: int) -> None:
    generator, dir, last, found = random.Random(0), root / "run", 1, []
    save(dir, make_step(), 1, "best", width)
    for _ in range(rounds):
        read, write = os.pipe()

        def body(rank: int, step: fds.Step, first=last, write=write) -> None:
            for calls in range(first + 1, first + 10_000):
                save(dir, step, calls, ("best", None)[calls % 2], width)
                os.write(write, (calls * 2 + rank).to_bytes(8, "little"))

        pids = two_ranks(root / "meeting", body)
        os.close(write)
        message = os.read(read, 8)  # both have come this far
        time.sleep(generator.uniform(0, 0.05))
        os.kill(pids[victim := generator.randrange(2)], signal.SIGKILL)
        statuses = ends(pids)
        assert statuses[victim] == -signal.SIGKILL and statuses[1 - victim] == 7, statuses
        with open(read, "rb") as file:
            message += file.read()
        at_least = max(int.from_bytes(message[i : i + 8], "little") // 2 for i in range(0, len(message), 8))
        last = check(dir, at_least, at_least + 1, width)
        found.append(last)
    print(f"random instants, width {width}: {rounds} kills, last saves {found}", flush=True)


def main(root: Path) -> None:
    """Kill, in every scenario."""
    with mock.patch.object(os, "fsync"):  # no power fails here, and fsync takes the time
        for victim in (0, 1):
            (root / str(victim)).mkdir()
            at_requests(root / str(victim), victim, (None, "best")[victim])
            local_at_requests(root / str(victim), victim)
        (root / "large").mkdir()
        at_random_instants(root / "large", ROUNDS, 100_000)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
