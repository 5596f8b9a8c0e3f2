"""Run as a program: kill a saving process at every request it makes of the file system, and at random instants.

Prints one line a scenario, `NAME: K kills, last saves L`, where L are the calls of the states found; exits with an
error if after any kill the last save does not load, is no state that was reached, or is older than one that returned.
"""

from __future__ import annotations

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
from fds.storage.disk.folders import tags
from tests.storage.faults import at_request
from tests.storage.states import Template, num_calls, small_state

ROUNDS = 6


def in_a_child(body: Callable[[], None]) -> int:
    """Fork, run, and return the process id."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        except BaseException as error:
            print(f"in the child: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    return pid


def die(request: str = "") -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save(dir: Path, calls: int, tag: str | None, width: int = 3, keep: int | None = None) -> None:
    state = small_state(calls, width)
    fds.save(dir, state, Template(state), tag, {"calls": calls}, keep=keep)


def check(dir: Path, at_least: int, at_most: int, width: int = 3) -> int:
    state, extra = fds.load(dir, Template(small_state(width=width)), {})
    calls = num_calls(state)
    assert extra == {"calls": calls} and at_least <= calls <= at_most, (calls, at_least, at_most)
    return calls


def at_requests(dir: Path, tag: str | None, stride: int, keep: int | None = None) -> None:
    found, n = [], 0
    while True:
        shutil.rmtree(dir, ignore_errors=True)
        save(dir, 1, tag)

        def body(n=n) -> None:
            with at_request(n, die):
                save(dir, 2, tag, keep=keep)

        _, status = os.waitpid(in_a_child(body), 0)
        if not os.WIFSIGNALED(status):
            assert status == 0, f"the child failed: {status}"
            break
        found.append(check(dir, 1, 2))
        save(dir, 3, tag, keep=keep)
        check(dir, 3, 3)
        assert not (dir / ".saving").exists()
        assert keep is None or len(tags(dir)) == keep, tags(dir)
        n += stride
    assert {1, 2} == set(found), found
    print(f"requests, tag {tag}, keep {keep}: {len(found)} kills, last saves {found}", flush=True)


def at_random_instants(dir: Path, tag: Callable[[int], str | None], width: int, keep: int | None = None) -> None:
    generator, last, found = random.Random(0), 1, []
    save(dir, 1, tag(1), width)
    for _ in range(ROUNDS):
        read, write = os.pipe()

        def body(first=last, write=write) -> None:
            for calls in range(first + 1, first + 10_000):
                save(dir, calls, tag(calls), width, keep)
                os.write(write, calls.to_bytes(8, "little"))

        child = in_a_child(body)
        time.sleep(generator.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the child ended by itself: {status}"
        os.close(write)
        with open(read, "rb") as file:
            returned = file.read()
        at_least = int.from_bytes(returned[-8:], "little") if returned else last
        last = check(dir, at_least, at_least + 1, width)
        found.append(last)
    print(f"random instants, width {width}: {ROUNDS} kills, last saves {found}", flush=True)


def main(root: Path, stride: int = 1) -> None:
    """Kill, in every scenario, at every request, or at some."""
    with mock.patch.object(os, "fsync"):  # no power fails here, and fsync takes the time
        at_requests(root / "new", None, stride)
        at_requests(root / "same", "best", stride)
        at_requests(root / "kept", None, stride, keep=1)
    at_random_instants(root / "each", lambda calls: f"at{calls % 5}", 3)
    at_random_instants(root / "large", lambda calls: "best", 100_000)
    at_random_instants(root / "kept each", lambda calls: None, 3, keep=2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
