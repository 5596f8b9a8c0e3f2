"""Interrupts: Ctrl-C ends a wait for other ranks, which runs in C++ and would hear of it when the time is over.

Python notes a signal and acts on it when C++ returns. While the main thread waits, the signal also writes a byte to a
pipe, which a thread reads; it then lets a message of its own run out of time, whereupon gloo closes the connections of
this rank, and every wait of it ends. So the ranks cannot talk any more, and all of them learn it at once.
Beginning and ending a wait costs 2 us.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
import weakref
from typing import Any

import torch

_TAG = 2**31 - 1  # of a message that nobody sends
_AT_ONCE = datetime.timedelta(milliseconds=1)

_waiting: list[tuple[Any, int]] = []  # the group in which the main thread waits, and another rank of it
_closed: list[weakref.ref] = []  # groups whose connections were closed
_pipe: list[int] = []  # what the signal writes to; of this process


class Interruptible:
    """Let Ctrl-C end what waits inside for ranks of a group, of which `other` is another one than this.

    It does nothing in other threads than the main one, where the program handles the signal by itself, or where
    another library is woken up by signals.
    """

    def __init__(self, group: Any, other: int):
        self.waits = (group, other)
        self.watches = False

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        before = signal.set_wakeup_fd(_pipe[0] if _pipe else _watched(), warn_on_full_buffer=False)
        self.watches = before == -1
        if self.watches:
            _waiting.append(self.waits)
        else:
            signal.set_wakeup_fd(before)

    def __exit__(self, *_: Any) -> None:
        if self.watches:
            _waiting.clear()
            signal.set_wakeup_fd(-1)


def was_closed(group: Any) -> bool:
    """Return whether Ctrl-C has closed the connections of a group on this rank."""
    return any(ref() is group for ref in _closed)


def _watched() -> int:
    """Start the thread that is told of signals, and return the descriptor by which it is."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    _pipe.append(write)
    threading.Thread(target=_watch, args=(read,), name="fds-interrupts", daemon=True).start()
    return write


def _watch(read: int) -> None:
    while data := os.read(read, 64):
        # A program that handles the signal by itself goes on. (Asked here: it takes 4 us.)
        if signal.SIGINT in data and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            for group, other in tuple(_waiting):
                _closed.append(weakref.ref(group))
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], other, _TAG).wait(_AT_ONCE)


os.register_at_fork(after_in_child=_pipe.clear)  # the thread is not there
