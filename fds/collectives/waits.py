"""Who waits for whom: ranks that wait for long say so in torch's store, and Ctrl-C ends a wait.

A message whose shape or dtype is not what a rank expects is never received, since gloo would end the process: it has
another tag (see `GlooLink`), so both ranks wait. After `LOOK` seconds each writes down what it waits for, and reads
what the other does. Where these are one collective of other shapes every rank is told so, long before the time limit.
A rank whose wait fails follows who waits for whom to the rank that waits for nobody.

A rank waits in C++, and Python runs signal handlers only after C++ returns. While the main thread waits, a signal also
writes a byte to a pipe, which another thread reads. That thread lets a receive time out, whereupon gloo closes all
connections of this rank and every wait ends, here and on the other ranks. Entering and leaving a wait takes 2 us.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import select
import signal
import threading
import time
import weakref
from typing import Any, NamedTuple

import attrs
import torch
import torch.distributed as dist

from fds.collectives.links import Collective
from fds.errors import RankError

LOOK = 0.5  # seconds of waiting after which a rank writes what for, and between looks at what others do
_rows: dict[int, dict[str, Any] | None] = {}  # by rank, as last read
GRACE = 2.0  # seconds for which the rank that hosts the store stays, for others to read it


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
    failed: bool = False

    def look(self) -> bool:
        """Write down what this rank waits for, and return whether it waits in vain, which others are told."""
        store, text, peer = _store(), str(self.collective), self.peer
        row = {"peer": peer, "text": text, "key": self.key, "sent": self.sent}
        store.set(f"rank {self.rank}", json.dumps(row))
        self.looks += 1
        if store.check(["verdict"]):
            return True
        _follow(store, self.rank, peer, late=True)  # to be remembered, should the store end
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

    def end(self) -> None:
        """Take back what was written, if anything was."""
        if self.looks and not self.failed:  # of what failed others are told later
            _store().set(f"rank {self.rank}", "")


class Origin(NamedTuple):
    """Where a fault that one rank sees began, as far as ranks have said."""

    different: dict[int, str] | None = None  # ranks that started different collectives, with them
    rank: int | None = None  # which was lost, or does not answer
    late: bool = False
    trail: str = ""  # a line for each rank that waits for another


def origin(rank: int, peer: int, text: str, *, late: bool) -> Origin:
    """Return where a fault began that showed itself to a rank as a lost or `late` peer, and tell others of it."""
    try:
        store = _store()
        row = {"peer": peer, "text": text, "failed": "late" if late else "lost"}
        store.set(f"rank {rank}", json.dumps(row))
        different = json.loads(store.get("verdict")) if store.check(["verdict"]) else None
        began = _follow(store, rank, peer, late=late)
        number, ended = store.add("failed", 1), time.monotonic() + GRACE
        others = dist.get_world_size() - (different is None)
        while rank == 0 and number < others and time.monotonic() < ended:
            time.sleep(LOOK / 10)  # the store may end with this process
            number = store.add("failed", 0)
    except (RuntimeError, ValueError):  # the rank that hosts the store has ended
        return _follow(None, rank, peer, late=late)
    if different is not None:
        return Origin({int(rank): text for rank, text in sorted(different.items())})
    return began


def _follow(store: Any, rank: int, peer: int, *, late: bool) -> Origin:
    """Follow who waits for whom, as far as ranks have said, or had said at the last look where there is no store."""
    at, seen, lines = peer, {rank}, list[str]()
    while at not in seen and (row := _read(store, at)) is not None:
        lines.append(f"rank {at} waits for rank {row['peer']} in {row['text']}")
        seen.add(at)
        at, late = row["peer"], row.get("failed", "late") == "late"
    return Origin(None, None if at in seen else at, late, "\n".join(lines))


def _store() -> Any:
    # private: torch has no public way to ask for the store of the default group
    return dist.PrefixStore("fds-waits", dist.distributed_c10d._get_default_store())


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
        before = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
        self.watches = before == -1
        if not self.watches:
            signal.set_wakeup_fd(before)
        _waiting.append(self.wait)

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.wait.failed = kind is RankError
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
    last: list[Wait] = []  # that was there at the last look
    ready = select.poll()
    ready.register(read, select.POLLIN)
    while True:
        if ready.poll(1000 * LOOK):
            # Nothing is closed if the program has its own handler; checked here, since it takes 4 us.
            data, handled = os.read(read, 64), signal.getsignal(signal.SIGINT) is signal.default_int_handler
            for wait in _waiting[:] if signal.SIGINT in data and handled else ():
                _closed.append(weakref.ref(wait.group))
                _close(wait)
            continue
        now = _waiting[:]
        for wait in last:
            try:
                if wait not in now:
                    wait.end()
                elif wait.look():
                    _close(wait)
            except (RuntimeError, ValueError):  # the rank that hosts the store has ended
                now = [other for other in now if other is not wait]
        last = now


def _close(wait: Wait) -> None:
    with contextlib.suppress(RuntimeError):
        wait.group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], wait.peer, _TAG).wait(_AT_ONCE)


os.register_at_fork(after_in_child=_pipe.clear)  # the thread does not exist in the child
