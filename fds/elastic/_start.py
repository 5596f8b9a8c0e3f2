"""A start of the ranks of an elastic run: which run it is, who trains, the state to go on from, and the boundaries."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import Any, Self

import attrs
import torch

from fds.collectives import Axis
from fds.elastic._history import Event, now, read_rows, write_row
from fds.errors import ElasticityError, ResizeError, StorageError
from fds.media.locks import lock_file
from fds.state import State
from fds.step import Step
from fds.storage import load
from fds.storage.disk.files import write_errors
from fds.storage.disk.folders import find, last_run, remember_run, tags
from fds.storage.format.manifest import read_manifest
from fds.storage.ranks.exchange import Ranks
from fds.storage.shelf import Pieces, Shelf

LOCK = ".running"  # of the job that trains in a directory, by its first rank
PATIENCE = 1.0  # seconds in which torchrun's agents see, each by itself, that a node waits: they look every 0.1 s


@attrs.frozen(eq=False)
class Start:
    """What the ranks of a start agree on before they compose."""

    path: Path
    everyone: Axis
    count: int  # of the ranks that train
    id: str
    job: str
    shelf: Shelf
    saved: int  # calls of the last save, -1 if there is none
    saved_at: str
    first: str  # when the run began
    again: bool  # whether this job has started before

    @property
    def saves(self) -> Path:
        """The directory of the saves."""
        return self.path / "save"

    def state(self, step: Step, params: Any, key: int, pieces: Pieces | None) -> tuple[Made, str]:
        """Return the state to go on from, and where it is from: "memory", "save" or "init"."""
        if pieces is not None:
            try:
                return Made(pieces.load(step, params), pieces.made, _tensors(pieces.extra)), "memory"
            except StorageError as error:  # on every rank that trains, and if others had to bring something, on those
                if self.saved < 0:
                    raise
                if self.everyone.index == 0:
                    print(f"fds: the state in memory cannot be read, the last save is taken: {error}", file=sys.stderr)
        if self.saved >= 0:
            state, numbers = load(self.saves, step, params)  # of a call that nobody has watched, or none
            return Made(state, self.saved_at, _tensors(numbers)), "save"
        return Made(step.init(params, key=key), self.first), "init"

    def event(self, kind: str, calls: int, **more: Any) -> Event:
        """Return an event of now."""
        return Event(kind, time.time(), calls, self.job, **more)

    def boundary(self, asked: Asked, calls: int) -> int:
        """Wait until all ranks have ended their call, and return how many there were.

        `calls` is -1 on ranks that have no part. Raises `ResizeError` if ranks were asked to end, `Leaving` for some.
        """
        rows = self.everyone.exchange_numbers([asked.now, calls], "boundary of two calls")
        made = max(made for _, made in rows)
        if leaving := [rank for rank, (now, _) in enumerate(rows) if now]:
            asked.wait()
            raise (Leaving if len(leaving) < len(rows) else ResizeError)(
                f"rank{'s' * (len(leaving) > 1)} {', '.join(map(str, leaving))} of {len(rows)} were asked to stop",
                where=f"after call {made}",
                got="SIGTERM, by which torchrun lets ranks come and go",
                want="to be started again: torchrun --nnodes MIN:MAX --max-restarts N",
                hint=f"the state is in the memory of the nodes, below {self.shelf.folder}",
            )
        return made


class Leaving(ResizeError):
    """Some ranks were asked to end and others were not: their nodes may go, and take along what is in their memory."""


class Asked:
    """Whether this process was asked to end, by SIGTERM. `with Asked() as asked:` restores the earlier handler."""

    now = False

    def __enter__(self) -> Self:
        self._before, self._pid = None, os.getpid()
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def wait(self) -> None:
        """Wait a moment to be asked as well, or torchrun's agent would take the end of this rank for a failure."""
        end = time.monotonic() + PATIENCE
        while not self.now and self._before is not None and time.monotonic() < end:
            time.sleep(0.01)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a worker of a loader, which was forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.now = True


@attrs.frozen(eq=False)
class Made:
    """A state that this rank holds, when it was made, and the metrics of the call that made it, if `watch` wants them.

    It may have been watched by some ranks, and not by others that were lost. So the next start watches it as well.
    """

    state: State
    at: str
    metrics: dict[str, Any] = attrs.field(factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        """The metrics as JSON."""
        return {name: x.item() for name, x in self.metrics.items() if isinstance(x, torch.Tensor) and x.numel() == 1}


def meet(
    path: Path, root: Path | None, everyone: Axis, numbers: Collection[int] | None, locks: contextlib.ExitStack
) -> Start:
    """Let the ranks agree on the run, its last save, and how many of them train; `locks` gets the lock of the run."""
    together = Ranks(everyone if everyone.size > 1 else None, "fds.elastic.run", everyone.index)
    count = max((n for n in numbers if n <= everyone.size), default=0) if numbers is not None else everyone.size
    if not count:
        raise ElasticityError(
            "too few ranks are there",
            got=f"{everyone.size}",
            want=f"one of {', '.join(map(str, sorted(numbers or ())[:16]))}",
            hint="torchrun --nnodes MIN:MAX waits for MIN nodes",
        )
    with together.together() as exchange:
        if everyone.index == 0:
            exchange.mine = _begin(path, locks)
        elif not path.parent.exists():
            raise StorageError("the ranks do not see one directory", where=str(path), want="a common file system")
    run, first, saved, saved_at, job, again = exchange.all[0]
    remember_run(path / "save", run)
    with together.together() as exchange:
        if not path.exists():
            raise StorageError("the ranks do not see one directory", where=str(path), want="a common file system")
        shelf, exchange.mine = Shelf.of(path, run, root), uuid.uuid4().hex
    return Start(path, everyone, count, exchange.all[0], job, shelf, saved, saved_at, first, again)


def _begin(path: Path, locks: contextlib.ExitStack) -> list[Any]:
    """Return the run's id, when it began, calls and time of its last save, the job, and whether that started before."""
    with write_errors(path, "run"):
        path.mkdir(parents=True, exist_ok=True)
    saves = path / "save"
    try:
        rows = read_rows(path)
    except OSError:
        rows = []
    jobs = [row.get("job", "") for row in rows if row.get("kind") == "start"]
    job = _job(jobs)
    with write_errors(path, "run"):
        try:
            locks.enter_context(lock_file(path / LOCK))
        except BlockingIOError:
            if job not in jobs:  # or a rank of an earlier start of this job has not ended yet, as one that hangs
                raise ElasticityError(
                    "another job trains in this directory",
                    where=str(path),
                    got=f"its last start was of job {jobs[-1] if jobs else '?'}",
                    want="one job at a time",
                    hint="end that job, or give this run a directory of its own",
                ) from None
    begun = next((row for row in rows if "run" in row), None)
    if begun is None:
        begun = {"run": last_run(saves) or uuid.uuid4().hex, "began": now()}
        write_row(path, begun)
    saved, saved_at = -1, ""
    if saves.is_dir() and tags(saves):
        manifest = read_manifest(find(saves, None))
        saved, saved_at = manifest.calls, manifest.saved
    return [begun["run"], begun["began"], saved, saved_at, job, job in jobs]


def _job(jobs: list[str]) -> str:
    """Return the name of this job. One that torchrun gives to all, or none has named, is drawn at the first start."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none":
        return name
    started = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return jobs[-1] if jobs and started else uuid.uuid4().hex[:8]


def _tensors(numbers: dict[str, float]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else None) for name, x in numbers.items()}
