"""Real ranks for tests: processes that stay, and a fresh gloo world for every job.

    from tests import ranks

    def job(x): ...                                # at the top level of a module; run in a world of torch.distributed
    results = ranks.run(job, 3, world_size=2)      # in rank order

Importing torch takes a process seconds, so ranks are forked from one that has done it; a job on ranks that run takes
some 30 ms. A rank that died or hung takes the pool with it, and the next job starts another one.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import importlib
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import attrs
import torch
import torch.distributed as dist

GRACE = 3.0  # seconds that the other ranks get when one has failed


class Forked(multiprocessing.context.ForkServerProcess):
    """A process that leaves alone what it shares with the one that it is forked from.

    Its garbage collector would walk over 600,000 objects, and so copy their memory: 0.7 s each time.
    """

    def run(self) -> None:
        gc.freeze()
        super().run()


forkserver = multiprocessing.get_context("forkserver")  # one for the whole process, for tests.programs too
forkserver.Process = Forked
forkserver.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "torch._dynamo",  # which the first step imports
        "fds.config.initialize",  # and with it all transforms; `import fds` alone loads next to nothing
        "fds.data",
        "fds.nn",
        "fds.storage",
        "hypothesis",
        "pytest",
    ]
)


class RankFailure(AssertionError):
    """What a job raised on its ranks, with their tracebacks."""


def run(function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 60.0) -> list[Any]:
    """Return what `function(*args)`, of the top level of a module, returns on each of `world_size` ranks.

    A rank waits for the others half of `timeout` (seconds) in a collective. Raises `RankFailure` where a rank raises,
    dies, or takes longer than `timeout`.
    """
    return _pool.run(function, args, world_size, timeout)


def spawn(function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 60.0) -> list[tuple]:
    """Run `function(*args)` in processes that end, in the environment that torchrun would give them.

    Return exit status (`-signal.SIGKILL` and the like) and output of each rank; kill them all when time is over.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        Process(_call, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, function, args)
        for rank in range(world_size)
    ]
    wait([rank.process.sentinel for rank in started], timeout)
    end = time.monotonic() + timeout
    for rank in started:
        rank.process.join(max(0.0, end - time.monotonic()))
    return [rank.end() for rank in started]


def alone(function: Callable[..., Any], *args: Any, timeout: float = 200.0) -> tuple[int | None, str]:
    """Run `function(*args)` in a process of its own, and return its exit status and output.

    It is killed after `timeout` seconds.
    """
    started = Process(function, *args)
    started.process.join(timeout)
    return started.end()


class Process:
    """A process whose output goes to a file."""

    def __init__(self, target: Callable[..., None], *args: Any):
        self.log = tempfile.NamedTemporaryFile("r")  # noqa: SIM115 (closed at the end)
        self.process = forkserver.Process(target=_redirected, args=(self.log.name, target, args), daemon=True)
        self.process.start()

    def output(self) -> str:
        with open(self.log.name) as file:
            return file.read()[-4000:]

    def end(self) -> tuple[int | None, str]:
        """Kill it if it runs, and return its exit status and output."""
        self.process.kill()
        self.process.join()
        result = self.process.exitcode, self.output()
        self.log.close()
        return result


@attrs.define(eq=False)
class Pool:
    """The processes with the pipes to them, and the store where they meet."""

    members: list[tuple[Process, Connection]] = attrs.field(factory=list)
    store: Any = None
    jobs: int = 0

    def run(self, function: Callable[..., Any], args: tuple, world_size: int, timeout: float) -> list[Any]:
        self._grow(world_size)
        self.jobs += 1
        job = pickle.dumps((function.__module__, function.__qualname__, args))
        members = self.members[:world_size]
        for rank, (_, pipe) in enumerate(members):
            pipe.send((self.jobs, rank, world_size, timeout, sys.path, job))
        answers = self._answers([pipe for _, pipe in members], timeout)
        if len(answers) == world_size and all(good for good, _ in answers.values()):
            return [pickle.loads(answers[rank][1]) for rank in range(world_size)]
        words = [f"rank {rank}:\n{answers[rank][1]}" for rank in sorted(answers) if not answers[rank][0]]
        silent = [rank for rank in range(world_size) if rank not in answers]
        for rank in silent:
            member, _ = members[rank]
            code = member.process.exitcode
            words.append(f"rank {rank} {'took too long' if code is None else f'ended with {code}'}:\n{member.output()}")
        if silent:
            self.end()
        raise RankFailure("\n".join(words))

    def _answers(self, pipes: list[Connection], timeout: float) -> dict[int, tuple[bool, Any]]:
        """Collect (did it return, what) by rank, until all have answered or time is over."""
        answers: dict[int, tuple[bool, Any]] = {}
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
        end = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    self.members[rank][0].process.join(5)
                if not answers.get(rank, (False,))[0]:
                    end = min(end, time.monotonic() + GRACE)
        return answers

    def _grow(self, world_size: int) -> None:
        if self.store is None:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self.members) < world_size:
            ours, theirs = forkserver.Pipe()
            self.members.append((Process(_serve, theirs, self.store.port), ours))
            theirs.close()
            assert ours.recv() == "ready"

    def end(self) -> None:
        """Kill all ranks; the next job starts others."""
        for process, pipe in self.members:
            process.end()
            pipe.close()
        self.members.clear()
        self.store = None


_pool = Pool()
atexit.register(_pool.end)


def _redirected(log: str, target: Callable[..., None], args: tuple) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    target(*args)


def _call(environment: dict[str, str], function: Callable[..., Any], args: tuple) -> None:
    os.environ.update(environment)
    function(*args)


def _serve(pipe: Connection, port: int) -> None:
    """Do the jobs that come through a pipe, until it is closed."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    pipe.send("ready")
    while True:
        try:
            number, rank, world_size, timeout, sys.path[:], job = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"job {number}", store),
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout / 2),
            )
            try:
                module, name, args = pickle.loads(job)
                answer = (True, pickle.dumps(getattr(importlib.import_module(module), name)(*args)))
            finally:
                dist.destroy_process_group()
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
