"""Processes beside the one that measures: they compile ahead and check, and what crashes or hangs ends only its own.

A task is a function of a module, called in a child as `function(*arguments, skip=..., tell=...)`. It calls
`tell(name)` before each contender; where the child dies or a contender takes too long, a new child does the task again
with that contender in `skip`, which is name -> why.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).parent.parent
START_S = 120.0  # until a child has imported what it needs, on a machine whose disk is cold
AT, DONE, RAISED = "at", "done", "raised"


@attrs.frozen
class Task:
    """What a child is asked for."""

    name: str
    function: Callable[..., Any]
    arguments: tuple = ()
    limit_s: float = 120.0  # from one `tell` to the next
    skip: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class Outcome:
    """What came of a task: its result, or why there is none."""

    result: Any = None
    error: str = ""


class Child:
    """One process, and what it is doing. torch's inductor compiles with so many processes of its own; 1 is itself."""

    def __init__(self, compile_threads: int = 1) -> None:
        self.pipe, end = Pipe()
        command = [sys.executable, "-m", "benchmarks.children", str(end.fileno())]
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(compile_threads)}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[end.fileno()], stdin=subprocess.DEVNULL
        )
        end.close()
        self.task: Task | None = None
        self.contender, self.deadline, self.fresh = "", 0.0, True

    def begin(self, task: Task) -> None:
        """Hand a task over."""
        self.task, self.contender = task, ""
        self.deadline = time.monotonic() + task.limit_s + (START_S if self.fresh else 0.0)
        self.fresh = False
        self.pipe.send((task.function, task.arguments, dict(task.skip)))

    def hear(self) -> Outcome | Task | None:
        """Return what came of the task, the task without its last contender, or None while it goes on."""
        assert self.task is not None
        try:
            if not self.pipe.poll():
                return (
                    self._broken(f"took more than {self.task.limit_s:g} s")
                    if time.monotonic() > self.deadline
                    else None
                )
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            self.process.wait(START_S)  # the pipe closes a little before
            return self._broken(f"ended the process ({_exit(self.process.returncode)})")
        if kind == AT:
            self.contender, self.deadline = value, time.monotonic() + self.task.limit_s
            return None
        task, self.task = self.task, None
        return Outcome(value) if kind == DONE else Outcome(error=f"{task.name}: {value}")

    def _broken(self, why: str) -> Outcome | Task:
        """End the process; blame the contender that it was busy with."""
        task, self.task = self.task, None
        self.end()
        assert task is not None
        if not self.contender or self.contender in task.skip:
            return Outcome(error=f"{task.name}: {why}")
        return attrs.evolve(task, skip={**task.skip, self.contender: why})

    def end(self) -> None:
        """End the process, and wait for that."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()


class Pool:
    """Children that stay between calls of `run`; with `fresh` a new one does each task."""

    def __init__(self, jobs: int, *, fresh: bool = False, compile_threads: int = 1):
        self.jobs, self.fresh, self.compile_threads = jobs, fresh, compile_threads
        self.idle: list[Child] = []

    def run(self, tasks: Iterable[Task], *, seconds: float = float("inf")) -> dict[str, Outcome]:
        """Do tasks, several at once, and return what came of each by name; of those not done in time, nothing."""
        waiting, busy, outcomes = deque(tasks), [], {}
        until = time.monotonic() + seconds
        try:
            while (waiting or busy) and time.monotonic() < until:
                while waiting and len(busy) < self.jobs:
                    child = self.idle.pop() if self.idle else Child(self.compile_threads)
                    child.begin(waiting.popleft())
                    busy.append(child)
                wait([child.pipe for child in busy], timeout=1.0)
                for child in list(busy):
                    task, heard = child.task, child.hear()
                    if heard is None:
                        continue
                    busy.remove(child)
                    if isinstance(heard, Task):
                        waiting.appendleft(heard)
                        continue
                    assert task is not None
                    outcomes[task.name] = heard
                    self._keep(child)
        finally:
            for child in busy:
                child.end()
        return outcomes

    def _keep(self, child: Child) -> None:
        if self.fresh or child.process.poll() is not None or child.pipe.closed:
            child.end()
        else:
            self.idle.append(child)

    def end(self) -> None:
        """End all children."""
        for child in self.idle:
            child.end()
        self.idle.clear()


def _exit(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _end_with_the_parent() -> None:
    """End this process when the one that started it does, also by a kill."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def serve(pipe: Connection) -> None:
    """Do tasks until there are no more."""
    while True:
        try:
            function, arguments, skip = pipe.recv()
        except EOFError:
            return
        try:
            answer = (DONE, function(*arguments, skip=skip, tell=lambda name: pipe.send((AT, name))))
        except Exception as error:
            traceback.print_exc()
            answer = (RAISED, f"{type(error).__name__}: {error}"[:2000])
        pipe.send(answer)


if __name__ == "__main__":
    _end_with_the_parent()
    serve(Connection(int(sys.argv[1])))
