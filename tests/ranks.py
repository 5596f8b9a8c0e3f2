"""Real ranks for tests: processes that stay, and a fresh gloo world for every job.

    from tests import ranks
    pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one pool

    def job(x): ...                                # at the top level of a module; run in a world of torch.distributed
    results = ranks.run(job, 3, world_size=2)      # in rank order

Starting a rank takes seconds, a job on ranks that run some milliseconds. A rank that died or hung takes the pool with
it, and the next job starts another one.
"""

from __future__ import annotations

import atexit
import datetime
import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

ROOT = Path(__file__).parents[1]
GRACE = 3.0  # seconds that the other ranks get when one has failed


class RankFailure(AssertionError):
    """What a job raised on its ranks, with their tracebacks."""


def run(function: Callable[..., Any], *args: Any, world_size: int = 2, timeout: float = 60.0) -> list[Any]:
    """Return what `function(*args)`, of the top level of a module, returns on each of `world_size` ranks.

    Raises `RankFailure` where a rank raises, dies, or takes more than `timeout` seconds.
    """
    return _pool.run(function, args, world_size, timeout)


@attrs.define(eq=False)
class Member:
    """One process."""

    process: subprocess.Popen
    pipe: Connection
    log: Any

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read()[-4000:]


class Pool:
    """The processes, and the store where they meet."""

    def __init__(self) -> None:
        self.members: list[Member] = []
        self.store: Any = None
        self.jobs = 0

    def run(self, function: Callable[..., Any], args: tuple, world_size: int, timeout: float) -> list[Any]:
        self._grow(world_size)
        self.jobs += 1
        job = pickle.dumps((function.__module__, function.__qualname__, args))
        members = self.members[:world_size]
        for rank, member in enumerate(members):
            member.pipe.send((self.jobs, rank, world_size, timeout, job))
        answers = self._answers(members, timeout)
        if len(answers) == world_size and all(good for good, _ in answers.values()):
            return [pickle.loads(answers[rank][1]) for rank in range(world_size)]
        words = [f"rank {rank}:\n{answers[rank][1]}" for rank in sorted(answers) if not answers[rank][0]]
        silent = [rank for rank in range(world_size) if rank not in answers]
        if silent:
            codes = [members[rank].process.poll() for rank in silent]
            words += [f"rank {r} {'took too long' if code is None else f'ended with {code}'}:\n{members[r].output()}"
                      for r, code in zip(silent, codes, strict=True)]  # fmt: skip
            self.end()
        raise RankFailure("\n".join(words))

    def _answers(self, members: list[Member], timeout: float) -> dict[int, tuple[bool, Any]]:
        """Collect (did it return, what) by rank, until all have answered, one has died, or time is over."""
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {member.pipe: rank for rank, member in enumerate(members)}
        end = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    members[rank].process.wait(5)
                if not answers.get(rank, (False,))[0]:
                    end = min(end, time.monotonic() + GRACE)
        return answers

    def _grow(self, world_size: int) -> None:
        if self.store is None:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self.members) < world_size:
            ours, theirs = Pipe()
            log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the rank)
            code = f"from tests import ranks; ranks.serve({theirs.fileno()}, {self.store.port})"
            process = _python(code, stdout=log, stderr=log, pass_fds=[theirs.fileno()])
            theirs.close()
            self.members.append(Member(process, ours, log))

    def end(self) -> None:
        """Kill all ranks; the next job starts others."""
        for member in self.members:
            member.process.kill()
            member.process.wait()
            member.pipe.close()
            member.log.close()
        self.members.clear()
        self.store = None


_pool = Pool()
atexit.register(_pool.end)


def serve(descriptor: int, port: int) -> None:
    """Do the jobs that come through a pipe, until it is closed."""
    import torch

    torch.set_num_threads(1)
    pipe, store = Connection(descriptor), None
    while True:
        try:
            number, rank, world_size, timeout, job = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group(
                "gloo", store=dist.PrefixStore(f"job {number}", store), rank=rank, world_size=world_size,
                timeout=datetime.timedelta(seconds=timeout / 2),  # so that a rank says what it waits for
            )  # fmt: skip
            try:
                module, name, args = pickle.loads(job)
                answer = (True, pickle.dumps(getattr(importlib.import_module(module), name)(*args)))
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


@attrs.define(eq=False)
class Started:
    """Ranks of their own, which a test may kill."""

    processes: list[subprocess.Popen]

    def wait(self, timeout: float = 60.0) -> list[tuple[int, str]]:
        """Return exit status and output of every rank; kill them all when time is over."""
        end = time.monotonic() + timeout
        try:
            outputs = [p.communicate(timeout=max(0.1, end - time.monotonic()))[0] for p in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        return [(p.returncode, output) for p, output in zip(self.processes, outputs, strict=True)]


def spawn(function: Callable[..., Any], *args: Any, world_size: int = 2) -> Started:
    """Start processes that each call `function(*args)`, in the environment that torchrun would give them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    code = f"import importlib; importlib.import_module({function.__module__!r}).{function.__qualname__}(*{args!r})"
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return Started([
        _python(code, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(world_size)
    ])  # fmt: skip


def _python(code: str, environment: dict[str, str] | None = None, **kwargs: Any) -> subprocess.Popen:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(environment or {})}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, **kwargs)
