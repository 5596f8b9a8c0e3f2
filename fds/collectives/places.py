"""Where a rank is: what its main thread runs, which it tells ranks that wait for it, in torch's store.

A rank that hangs runs nothing of ours in its main thread. A thread of each rank therefore looks, once a second and only
while its rank has not come to a message for a second, whether anybody asks. A step is told nothing: its station is read
from the functions of fds that are on the stack.
"""

from __future__ import annotations

import json
import linecache
import os
import site
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import torch
import torch.distributed as dist

ANSWER = 2.0  # seconds that a rank is given to say where it is
SILENT = "does not answer at all: stopped, or stuck in C code without releasing the GIL"
_LINES = 12  # of a stack in an error
_ASKED = 8  # ranks of which an error says where they are

_FDS = str(Path(__file__).parents[1]) + os.sep
_INSTALLED = (
    "<",
    *(str(Path(path)) + os.sep for path in (sysconfig.get_path("stdlib"), Path(torch.__file__).parent)),
    *(path + os.sep for path in site.getsitepackages()),
)

STATIONS = {  # function of fds, innermost first -> what a step does there
    "fds.step.batch:split_batch": "split",
    "fds.step.parameters:open_parameters": "gather",
    "fds.step.execution:Microbatch.forward": "loss",
    "fds.step.sums:InPlace.add": "backward",
    "fds.step.sums:InPlace.finish": "reduce",
    "fds.step.sharding.buckets:Bucketed.add": "backward",
    "fds.step.sharding.buckets:Bucketed.finish": "reduce",
    "fds.step.sharding.buckets:Bucketed._launch": "reduce",
    "fds.transforms.pipeline.stage:Stage.forward": "loss",
    "fds.transforms.pipeline.stage:Stage.backward": "backward",
    "fds.transforms.pipeline.stage:Stage.backward_input": "backward",
    "fds.transforms.pipeline.stage:Stage.backward_weight": "backward",
    "fds.step.program:Step.decide": "measure",
    "fds.step.update:Update.run": "optimizer",
    "fds.step.update:Update.follow": "after",
}
MICROBATCHES = {  # function of fds -> its variables that number the microbatch, and the stage of a pipeline
    "fds.step.execution:InTurn.train": ("i", ""),
    "fds.transforms.pipeline.computations:Computations._do": ("i", "s"),
}
STEP = "fds.step.program:Step.__call__"


@attrs.frozen
class Place:
    """Where the main thread of a rank is.

    Attributes:
        name: the innermost function that is the user's, with file and line: `loss_fn (train.py:42)`.
        station: `in station loss of microbatch 3 of call 17`, or that it is outside of a step.
        lines: the stack, the outermost first, functions of fds and of what is installed counted only.
        stack: all of it, as a traceback has it.
        seconds: for which it has been there at least.
        number: how often this rank was asked when it answered.
        change: how often it was asked at another place before.
    """

    name: str
    station: str
    lines: tuple[str, ...]
    stack: str
    seconds: float = 0.0
    number: int = 0
    change: int = 0

    def __str__(self) -> str:
        since = f"has been in {self.name} for {self.seconds:.0f} s" if self.seconds >= 1 else f"is in {self.name}"
        return f"{since}, {self.station}"


def place_of(frame: FrameType) -> Place:
    """Return where a thread is whose innermost frame this is."""
    frames = [frame for frame, _ in traceback.walk_stack(frame)][::-1]
    users = [frame for frame in frames if not frame.f_code.co_filename.startswith((_FDS, *_INSTALLED))]
    last = users[-1] if users else frames[-1]
    stack = "".join(traceback.StackSummary.extract((frame, _line(frame)) for frame in frames).format())
    name = f"{last.f_code.co_name} ({_at(last)})"
    return Place(name, _station(frames[::-1]), tuple(_lines(frames, users))[-_LINES:], stack)


def _at(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{_line(frame)}"


def _line(frame: FrameType) -> int:
    """Return the line at which a frame is, of one that runs and is between lines the first of its function."""
    return frame.f_lineno or frame.f_code.co_firstlineno


def _lines(frames: Sequence[FrameType], users: Sequence[FrameType]) -> Iterator[str]:
    skipped = 0
    for frame in frames:
        if frame not in users and frame is not frames[-1]:
            skipped += 1
            continue
        if skipped:
            yield f"... {skipped} calls of fds and of what is installed"
            skipped = 0
        code = linecache.getline(frame.f_code.co_filename, _line(frame)).strip()
        yield f"{_at(frame)} in {frame.f_code.co_name}: {code}"


def _station(frames: Sequence[FrameType]) -> str:
    """Return the station of a step from the functions on a stack, the innermost first."""
    station, microbatch = "", ""
    for frame in frames:
        name = f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}"
        station = station or STATIONS.get(name, "")
        if name in MICROBATCHES and not microbatch:
            index, stage = (frame.f_locals.get(variable) for variable in MICROBATCHES[name])
            of_stage = "" if stage is None else f" on stage {stage}"
            microbatch = "" if index is None else f"microbatch {index}{of_stage} of "
        if name == STEP:
            where = f"in station {station}" if station else "in a step"
            return f"{where}, {microbatch}call {int(frame.f_locals['state'].calls) + 1}".replace(", micro", " of micro")
    return "outside of a step"


def process_name() -> str:
    """Return which process this is, for who looks into it."""
    return f"process {os.getpid()} on {socket.gethostname()}"


@attrs.define(eq=False)
class Answers:
    """What a rank tells of itself in the store of a group.

    Attributes:
        store: torch's.
        rank: this one.
        answered: how often it was asked before.
        place: the last that it has told.
        since: when it was first seen there.
        changes: how often it was seen elsewhere before.
    """

    store: Any
    rank: int
    answered: int
    place: Place | None = None
    since: float = 0.0
    changes: int = 0

    @classmethod
    def begin(cls) -> Answers:
        """Tell the store of the default group that this rank can be asked."""
        store, rank = shared_store(), dist.get_rank()
        store.set(f"here {rank}", process_name())
        return cls(store, rank, store.add(f"asked {rank}", 0))

    def answer(self) -> None:
        """Write down where the main thread is, if anybody asks. Raises `RuntimeError` where the store has ended."""
        _check_there(self.store)
        number = self.store.add(f"asked {self.rank}", 0)
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        if number == self.answered or frame is None:
            return
        self.answered, place, now = number, place_of(frame), time.monotonic()
        if self.place is None or (place.name, place.station) != (self.place.name, self.place.station):
            self.since, self.changes = now, self.changes + 1
        self.place = attrs.evolve(place, seconds=now - self.since, number=number, change=self.changes)
        self.store.set(f"place {self.rank}", json.dumps(attrs.asdict(self.place)))


def shared_store() -> Any:
    """Return the store in which ranks of the default group say what they wait for, and where they are."""
    # private: torch has no public way to ask for the store of the default group
    return dist.PrefixStore("fds-waits", dist.distributed_c10d._get_default_store())


def _check_there(store: Any) -> None:
    """Raise `OSError` where nobody listens at the address of a store: torch would print a page about it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        socket.create_connection((store.host, store.port), timeout=ANSWER).close()


def ask(store: Any, rank: int) -> int:
    """Ask a rank where it is, and return the number of the question."""
    return store.add(f"asked {rank}", 1)


def read_place(store: Any, rank: int) -> Place | None:
    """Return where a rank has last said to be."""
    key = f"place {rank}"
    if not store.check([key]):
        return None
    row = json.loads(store.get(key))
    return Place(**{**row, "lines": tuple(row["lines"])})


def where_are(store: Any, ranks: Sequence[int]) -> dict[int, tuple[str, tuple[str, ...]]]:
    """Ask ranks where they are; return of each a sentence that goes on after its name, and lines of its stack."""
    questions, places = {rank: ask(store, rank) for rank in ranks[:_ASKED]}, dict[int, Place]()
    end = time.monotonic() + ANSWER
    while len(places) < len(questions) and time.monotonic() < end:
        for rank in questions.keys() - places.keys():
            place = read_place(store, rank)
            if place is not None and place.number >= questions[rank]:
                places[rank] = place
        time.sleep(ANSWER / 40)
    return {rank: _said(store, rank, places.get(rank)) for rank in questions}


def _said(store: Any, rank: int, place: Place | None) -> tuple[str, tuple[str, ...]]:
    if not store.check([f"here {rank}"]):
        return "has neither called fds.init_distributed nor made a mesh", ()
    process = store.get(f"here {rank}").decode()
    if place is not None:
        return str(place), (f"rank {rank} is {process}; the stack of its main thread:", *place.lines)
    before = read_place(store, rank)
    return SILENT, (f"rank {rank} is {process}", *([f"before that it was in {before.name}"] if before else []))
