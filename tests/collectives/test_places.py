"""Where a rank is: real ranks that hang in a loss, in a loader or as a whole say so, or it is said of them."""

import importlib
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fds
from fds.collectives import places, waits
from fds.errors import RankError
from tests import ranks
from tests.collectives.cases import axis

LIMIT = 2.0  # seconds that a rank waits for others


def next_batch(hangs: Callable[[], bool]) -> torch.Tensor:
    while hangs():
        time.sleep(0.1)
    return torch.ones(8, 4)


def start_again() -> None:
    """Leave the world of the pool for one whose limit is short, a second start in this process."""
    rank, size, address = dist.get_rank(), dist.get_world_size(), []
    if rank == 0:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            address.append(f"tcp://127.0.0.1:{s.getsockname()[1]}")
    address = axis().exchange(address)[0]
    dist.destroy_process_group()
    fds.init_distributed("gloo", timeout=LIMIT, rank=rank, world_size=size, init_method=address[0])


def hang_in_a_second_start(how: str) -> str:
    before, waits.LOOK = waits.LOOK, 0.1
    start_again()
    said = train(how)
    waits.LOOK = before
    return said


def train(how: str) -> str:
    """Train three calls, in the second of which rank 1 hangs until another has been told; return what it is told."""
    dp, losses = axis(), []
    pids, (flag, *_) = dp.exchange(os.getpid()), dp.exchange(tempfile.mktemp())
    end = time.monotonic() + 20

    def hangs(where: str) -> bool:
        return where == how and dp.index == 1 and not os.path.exists(flag) and time.monotonic() < end

    def loss_fn(params, batch):
        losses.append(1)
        while len(losses) == 7 and hangs("loss"):
            time.sleep(0.1)
        if len(losses) == 7 and hangs("stopped"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return (batch @ params["w"]).square().mean()

    step = fds.compose(fds.accumulate(4), fds.shard_optimizer(dp, stage=2), fds.adamw(lr=0.01))(loss_fn)
    state = step.init({"w": torch.ones(4, 2)})
    try:
        for i in range(3):
            state, _ = step(state, next_batch(lambda i=i: i == 1 and hangs("loader")))
    except RankError as error:
        return str(error)
    finally:
        if dp.index == 0:
            open(flag, "w").close()
            os.kill(pids[1], signal.SIGCONT)
    return "nothing"


LOSS = r"loss_fn \(test_places.py:\d+\)"
SAYS = {  # how a rank hangs, one after the other in the same processes, each a start of its own
    "loss": rf"rank 1 did not answer in time: it (is|has been) in {LOSS}( for \d+ s)?, in station loss of microbatch 2 "
    r"of call 2\n(?s:.*)rank 1 is process \d+ on (?s:.*)in loss_fn: (while|time.sleep)",
    "loader": r"rank 1 did not answer in time: it (is|has been) in next_batch \(test_places.py:\d+\)( for \d+ s)?, "
    r"outside of a step\n(?s:.*)in train: state, _ = step\(state, next_batch",
    "stopped": r"rank 1 did not answer in time: it does not answer at all: stopped, or stuck in C code without "
    r"releasing the GIL\n(?s:.*)rank 1 is process \d+ on (?s:.*)state T",
}


@pytest.mark.parametrize("how", SAYS)
def test_a_rank_that_hangs_is_named_with_where_it_is_in_every_start_of_a_process(how):
    said = ranks.run(hang_in_a_second_start, how, world_size=3)
    for rank in (0, 2):
        assert re.match(SAYS[how], said[rank]), said[rank]


def hang_in_a_start(rank: int, port: int) -> None:
    """Be a rank of an agent of torchrun, whose store stays from one start to the next."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    fds.init_distributed("gloo", timeout=LIMIT)
    waits.LOOK = 0.1
    print(train("loss"), flush=True)


def test_a_rank_is_named_again_after_torchrun_has_started_all_again():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(2):
        started = [ranks.Process(hang_in_a_start, rank, store.port) for rank in range(2)]
        started[0].process.join(30)
        (_, text), _ = [each.end() for each in started]
        assert re.search(SAYS["loss"], text), text


class Memory(dict):
    """A store in memory."""

    def add(self, key: str, number: int) -> int:
        self[key] = self.get(key, 0) + number
        return self[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


def test_nobody_is_answered_who_did_not_ask_and_a_place_counts_its_seconds(monkeypatch):
    store, now = Memory(), [100.0]
    monkeypatch.setattr(places.time, "monotonic", lambda: now[0])
    answers = places.Answers(store, 1, 0)
    answers.answer()
    assert "place 1" not in store

    def ask_at(seconds: float):
        now[0] = 100.0 + seconds
        number = places.ask(store, 1)
        answers.answer()
        place = places.read_place(store, 1)
        assert place is not None and place.number == number
        return place

    first, second, *_ = [ask_at(seconds) for seconds in (0.0, 12.0)]
    assert str(first).startswith("is in ask_at (test_places.py:") and first.station == "outside of a step"
    assert str(second).startswith("has been in ask_at") and " for 12 s" in str(second)
    third = (lambda: ask_at(13.0))()
    assert third.change == first.change  # a caller is not the innermost function
    assert not any("/fds/" in line for line in third.lines) and "answer" in third.stack


def test_what_a_rank_said_before_it_was_stopped_is_not_where_it_is(monkeypatch):
    monkeypatch.setattr(places, "ANSWER", 0.1)
    store = Memory()
    store.set("here 1", "process 7 on host")
    places.ask(store, 1)
    places.Answers(store, 1, 0).answer()
    [(said, lines)] = places.where_are(store, [1]).values()  # another question, which nobody answers
    assert said == places.SILENT and lines[0] == "rank 1 is process 7 on host"
    assert lines[1].startswith("before that it was in test_what_a_rank_said_before")
    [(said, lines)] = places.where_are(store, [2]).values()
    assert said.startswith("has neither called fds.init_distributed") and not lines


def test_a_frame_between_two_lines_is_at_the_first_of_its_function():
    """A thread that runs has no line where the interpreter begins or ends a call."""

    def here():
        return sys._getframe()

    line = here.__code__.co_firstlineno
    here.__code__ = here.__code__.replace(co_linetable=b"")
    place = places.place_of(here())
    assert place.name == f"here (test_places.py:{line})" and place.lines[-1].endswith("in here: def here():")


@pytest.mark.parametrize("name", [*places.STATIONS, *places.MICROBATCHES, places.STEP])
def test_functions_that_tell_a_station_are_there(name):
    module, _, function = name.partition(":")
    value = importlib.import_module(module)
    for part in function.split("."):
        value = getattr(value, part)
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    assert value.__code__.co_qualname == function
    for variable in filter(None, places.MICROBATCHES.get(name, ("state",) if name == places.STEP else ())):
        assert variable in value.__code__.co_varnames + value.__code__.co_cellvars


def write_to_the_log() -> list[Any]:
    """Let rank 1 come late, though within the limit; return what the log says, and how many threads run."""
    records = []
    waits._log.addFilter(lambda record: records.append(record.getMessage()) is not None)
    (note, waits.NOTE), (look, waits.LOOK) = (waits.NOTE, 0.0), (waits.LOOK, 0.1)
    a = axis()
    a.barrier()
    if a.index == 1:
        time.sleep(1.6)
    a.barrier()
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("fds-")]
    waits.NOTE, waits.LOOK = note, look
    return [len(names) - len({*names}), *records]


def test_who_waits_long_writes_once_to_the_log_for_whom():
    said = ranks.run(write_to_the_log, world_size=3)
    notes = [note for doubled, *notes in said for note in notes]
    assert [doubled for doubled, *_ in said] == [0, 0, 0]
    assert len(notes) == 1 and "for rank 1, in barrier" in notes[0], notes
    assert "Rank 1 is in write_to_the_log" in notes[0] or "Rank 1 has been in write_to_the_log" in notes[0]
