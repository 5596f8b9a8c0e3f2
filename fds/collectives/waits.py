"""Who waits for whom: ranks that wait for long say so in torch's store, and Ctrl-C ends a wait.

A message whose shape or dtype is not what a rank expects is never received, since gloo would end the process: it has
another tag (see `GlooLink`), so both ranks wait. After `LOOK` seconds each writes down what it waits for, and reads
what the other does. Where these are one collective of other shapes every rank is told so, long before the time limit.
A rank whose wait fails follows who waits for whom to the rank that waits for nobody, which is asked where it is
(`places`), and is asked before, from the second second of a wait on: so it can say for how long.

A rank waits in C++, and Python runs signal handlers only after C++ returns. While the main thread waits, a signal also
writes a byte to a pipe, which another thread reads. That thread lets a receive time out, whereupon gloo closes all
connections of this rank and every wait ends, here and on the other ranks. Entering and leaving a wait takes 2 us.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import logging
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import attrs
import torch
import torch.distributed as dist

from fds.collectives.links import Collective
from fds.collectives.places import ANSWER, SILENT, Answers, Place, ask, read_place, shared_store, where_are
from fds.errors import RankError

T = TypeVar("T")

LOOK = 0.5  # seconds of waiting after which a rank writes what for, and between looks at what others do
_rows: dict[int, dict[str, Any] | None] = {}  # by rank, as last read
GRACE = 2.0  # seconds for which the rank that hosts the store stays, for others to read it
REPLY = 2.0  # seconds in which the store answers, if the rank that hosts it is not stopped
ASK = 3  # looks after which the rank that is waited for is asked where it is
KEEP = 8  # looks from one at which its answer is read to the next, to be known should the store end
NOTE = 60.0  # seconds of waiting, or half the limit where that is less, after which the log says for whom
_places: dict[int, Place] = {}  # by rank, as last read
_log = logging.getLogger("fds")


class Label(NamedTuple):
    """What tells a message from others: its tag, and which of the link's it is, whatever its shape."""

    tag: int
    key: str


@attrs.define(eq=False)
class Wait:
    """A rank of a group that waits in a collective for a message of another."""

    group: Any
    rank: int
    collective: Collective
    key: str  # of what it receives, "" where it only sends
    sent: dict[int, tuple[str, str]]  # the last message to each rank of the link: its key, and shape and dtype
    one_way: bool  # whether the other rank only sends, and need not wait for this one
    peer: int = -1
    looks: int = 0
    noted: bool = False
    failed: bool = False

    def look(self) -> bool:
        """Write down what this rank waits for, and return whether it waits in vain, which others are told."""
        store, text, peer = shared_store(), str(self.collective), self.peer
        row = {"peer": peer, "text": text, "key": self.key, "sent": self.sent}
        store.set(f"rank {self.rank}", json.dumps(row))
        self.looks += 1
        if store.check(["verdict"]):
            return True
        began = _follow(store, self.rank, peer, late=True)  # to be remembered, should the store end
        if self.looks >= ASK and began.rank is not None:
            self._ask(store, began.rank)
        theirs = _read(store, peer)
        if theirs is None or "failed" in theirs or not self.key:
            return False
        if self.one_way:
            want, (key, got) = kind_of(self.collective), theirs["sent"].get(str(self.rank), ("", ""))
            said = f"send of {got}"
        else:
            want, key, got = text, theirs["key"], theirs["text"]
            said = got
        if key != self.key or got == want:
            return False
        store.compare_set("verdict", "", json.dumps({self.rank: text, peer: said}))
        return True

    def _ask(self, store: Any, rank: int) -> None:
        """Ask the rank for which others wait where it is, and write it to the log, once for a place, after a while."""
        number, waited = ask(store, rank), self.looks * LOOK
        notes = not self.noted and waited >= min(NOTE, limit_of(self.group) / 2)
        if self.looks % KEEP and not notes:
            return
        place = read_place(store, rank)
        if place is not None:
            _places[rank] = place
        if not notes:
            return
        answers = place is not None and number - place.number < 2 * ASK * dist.get_world_size()
        if not answers and self.looks < ASK + ANSWER / LOOK:
            return  # it may answer yet
        self.noted = True
        if store.add(f"noted {rank} {place.change if answers and place else 'silent'}", 1) == 1:
            where, stack = (str(place), f"\n{place.stack}") if answers and place else (SILENT, "")
            text = "rank %d has waited %.0f s of at most %.0f for rank %d, in %s. Rank %d %s.%s"
            limit = limit_of(self.group)
            _log.warning(text, self.rank, waited, limit, rank, self.collective, rank, where, stack.rstrip())

    def end(self) -> None:
        """Take back what was written, if anything was."""
        if self.looks and not self.failed:  # of what failed others are told later
            shared_store().set(f"rank {self.rank}", "")


class Origin(NamedTuple):
    """Where a fault that one rank sees began, as far as ranks have said."""

    different: dict[int, str] | None = None  # ranks that started different collectives, with them
    rank: int | None = None  # which was lost, or does not answer
    late: bool = False
    trail: str = ""  # a line for each rank that waits for another
    place: str = ""  # where the rank is that does not answer
    stack: tuple[str, ...] = ()  # lines of it


def origin(rank: int, peer: int, text: str, *, late: bool) -> Origin:
    """Return where a fault began that showed itself to a rank as a lost or `late` peer, and tell others of it."""
    try:
        different, began = _within(REPLY, lambda: _tell(rank, peer, text, late=late))
        if different is None and began.late and began.rank is not None:
            began = _within(REPLY + ANSWER, lambda: _placed(began))
        _within(REPLY + GRACE, lambda: _stay(rank, dist.get_world_size() - (different is None)))
    except TimeoutError:
        began = _follow(None, rank, peer, late=late)
        silent = SILENT if began.late and began.rank == 0 else ""
        return began._replace(
            place=silent, stack=("torch's store, which rank 0 hosts unless torchrun does, does not answer",)
        )
    except (RuntimeError, ValueError):  # the rank that hosts the store has ended
        began = _follow(None, rank, peer, late=late)
        place = _places.get(-1 if began.rank is None else began.rank)
        return began if place is None or not began.late else began._replace(place=str(place), stack=place.lines)
    if different is not None:
        return Origin({int(rank): text for rank, text in sorted(different.items())})
    return began


def _tell(rank: int, peer: int, text: str, *, late: bool) -> tuple[dict[str, str] | None, Origin]:
    """Tell others of a wait that failed; return collectives that differ, if any do, and where it began."""
    store = shared_store()
    store.set(f"rank {rank}", json.dumps({"peer": peer, "text": text, "failed": "late" if late else "lost"}))
    different = json.loads(store.get("verdict")) if store.check(["verdict"]) else None
    return different, _follow(store, rank, peer, late=late)


def _placed(began: Origin) -> Origin:
    """Ask the rank that does not answer where it is."""
    assert began.rank is not None
    [(place, stack)] = where_are(shared_store(), [began.rank]).values()
    return began._replace(place=place, stack=stack)


def _stay(rank: int, others: int) -> None:
    """Stay for others that failed as well, where this may be the rank that hosts the store, which ends with it."""
    store = shared_store()
    number, ended = store.add("failed", 1), time.monotonic() + GRACE
    while rank == 0 and number < others and time.monotonic() < ended:
        time.sleep(LOOK / 10)
        number = store.add("failed", 0)


def _within(seconds: float, function: Callable[[], T]) -> T:
    """Return what a function returns, or raise what it raises; `TimeoutError` where it takes longer.

    Torch's store waits for its host without a limit.
    """
    results, errors = list[T](), list[BaseException]()

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="fds-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def everywhere(ranks: tuple[int, ...]) -> tuple[str, ...]:
    """Return lines that say where ranks are, as far as they can say it."""
    try:
        places = _within(REPLY + ANSWER, lambda: where_are(shared_store(), ranks))
    except (TimeoutError, RuntimeError, ValueError):
        return ()
    return tuple(f"rank {rank} {place}" for rank, (place, _) in places.items())


def limit_of(group: Any) -> float:
    """Return for how many seconds a rank waits for others in a gloo group."""
    # private: torch has no public way to ask a group for its timeout
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def _follow(store: Any, rank: int, peer: int, *, late: bool) -> Origin:
    """Follow who waits for whom, as far as ranks have said, or had said at the last look where there is no store."""
    at, seen, lines = peer, {rank}, list[str]()
    while at not in seen and (row := _read(store, at)) is not None:
        lines.append(f"rank {at} waits for rank {row['peer']} in {row['text']}")
        seen.add(at)
        at, late = row["peer"], row.get("failed", "late") == "late"
    return Origin(None, None if at in seen else at, late, "\n".join(lines))


def _read(store: Any, rank: int) -> dict[str, Any] | None:
    """Return what a rank waits for; None where it does not, or not for long."""
    if store is not None:
        key = f"rank {rank}"
        _rows[rank] = json.loads(store.get(key) or "null") if store.check([key]) else None
    return _rows.get(rank)


def kind_of(collective: Collective) -> str:
    """Return the shape and dtype of what a collective carries."""
    return f"{collective.shape} {str(collective.dtype).removeprefix('torch.')}"


_TAG = 2**31 - 1  # of a message that is never sent
_AT_ONCE = datetime.timedelta(milliseconds=1)

_waiting: list[Wait] = []  # in which the main thread is
_closed: list[weakref.ref] = []  # groups whose connections were closed on Ctrl-C
_pipe: list[int] = []  # the descriptor that signals of this process write to


class Interruptible:
    """Let Ctrl-C end a wait inside, and look from time to time whether it is in vain.

    It has no effect outside the main thread. Ctrl-C has none if the program installed its own handler of SIGINT, or if
    another library uses `signal.set_wakeup_fd`.
    """

    def __init__(self, wait: Wait):
        self.wait = wait
        self.watches = False

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        pipe = _pipe[0] if _pipe else _start_watching()
        _looking[0].start()
        before = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
        self.watches = before == -1
        if not self.watches:
            signal.set_wakeup_fd(before)
        _waiting.append(self.wait)

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.wait.failed = kind is RankError
        _passed[0] += 1
        if self.wait in _waiting:
            _waiting.clear()
            if self.watches:
                signal.set_wakeup_fd(-1)


def was_closed(group: Any) -> bool:
    """Return whether Ctrl-C has closed the connections of a group on this rank."""
    return any(ref() is group for ref in _closed)


def _start_watching() -> int:
    """Start the thread that waits for signals, and return the descriptor that wakes it up."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    _pipe.append(write)
    threading.Thread(target=_watch, args=(read,), name="fds-interrupts", daemon=True).start()
    return write


def _watch(read: int) -> None:
    ready = select.poll()
    ready.register(read, select.POLLIN)
    while True:
        ready.poll()
        # Nothing is closed if the program has its own handler; checked here, since it takes 4 us.
        data, handled = os.read(read, 64), signal.getsignal(signal.SIGINT) is signal.default_int_handler
        for wait in _waiting[:] if signal.SIGINT in data and handled else ():
            _closed.append(weakref.ref(wait.group))
            _close(wait)


@attrs.define(eq=False)
class Looking:
    """The thread that looks at waits, and answers ranks that wait for this one.

    Attributes:
        answers: to those of the default group; None before there is one, and when its store has ended.
        ended: set when the process ends.
        last: the wait that was there at the last look.
        passed: how many waits had ended.
        quiet: for how many looks no wait has begun or ended.
    """

    answers: Answers | None = None
    ended: threading.Event = attrs.field(factory=threading.Event)
    last: list[Wait] = attrs.field(factory=list)
    passed: int = 0
    quiet: int = 0
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if it does not run."""
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, name="fds-waits", daemon=True)
            self.thread.start()

    def stop(self) -> None:
        """End the thread, which must not be in torch when Python ends."""
        self.ended.set()
        if self.thread is not None:
            self.thread.join(REPLY)

    def run(self) -> None:
        """Look every so often."""
        while not self.ended.wait(LOOK):
            now = self.last = self.look_at(_waiting[:])
            self.quiet = 0 if now or _passed[0] != self.passed else self.quiet + 1
            self.passed = _passed[0]
            if self.quiet and self.quiet % 2 == 0:
                self.answer()

    def look_at(self, now: list[Wait]) -> list[Wait]:
        """Look at waits that were there at the last look too; return those at which to look again."""
        for wait in self.last:
            try:
                if wait not in now:
                    wait.end()
                elif wait.look():
                    _close(wait)
            except (RuntimeError, ValueError):  # the rank that hosts the store has ended
                now = [other for other in now if other is not wait]
        return now

    def answer(self) -> None:
        """Answer, as long as the default group is there of which the store is."""
        answers = self.answers
        if answers is None or not dist.is_initialized():
            return
        try:
            answers.answer()
        except (RuntimeError, ValueError, OSError):  # the rank that hosts the store has ended
            self.answers = None if self.answers is answers else self.answers


_passed = [0]  # waits that have ended
_looking = [Looking()]


def answer_others() -> None:
    """Have this rank say where it is, from now on, if ranks of the default group wait for it."""
    _rows.clear()
    _places.clear()
    with contextlib.suppress(RuntimeError):  # a store that is none, as torch's fake one
        _looking[0].answers = Answers.begin()
    _looking[0].start()


def _close(wait: Wait) -> None:
    with contextlib.suppress(RuntimeError):
        wait.group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], wait.peer, _TAG).wait(_AT_ONCE)


def _begin_in_child() -> None:
    """Forget the threads, which do not exist in the child of a fork."""
    _pipe.clear()
    _waiting.clear()
    _looking[0] = Looking()


os.register_at_fork(after_in_child=_begin_in_child)
atexit.register(lambda: _looking[0].stop())
