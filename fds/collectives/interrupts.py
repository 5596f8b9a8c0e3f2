"""Handle Ctrl-C while a rank waits for others in C++, which otherwise would go on until the timeout.

Python runs signal handlers only after C++ returns. While the main thread waits, a signal also writes a byte to a pipe,
which another thread reads. That thread lets a receive time out, whereupon gloo closes all connections of this rank and
every wait ends, here and on the other ranks. Entering and leaving a wait takes 2 us.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import signal
import threading
import weakref
from typing import Any

import torch

from fds.collectives.waits import LOOK, Wait
from fds.errors import RankError

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
        pipe = _pipe[0] if _pipe else _watched()
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


def _watched() -> int:
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
                now = [one for one in now if one is not wait]
        last = now


def _close(wait: Wait) -> None:
    with contextlib.suppress(RuntimeError):
        wait.group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], wait.peer, _TAG).wait(_AT_ONCE)


os.register_at_fork(after_in_child=_pipe.clear)  # the thread does not exist in the child
