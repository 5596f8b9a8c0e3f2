"""Handle Ctrl-C while a rank waits for others in C++, which otherwise would go on until the timeout.

Python runs signal handlers only after C++ returns. While the main thread waits, a signal also writes a byte to a pipe,
which another thread reads. That thread lets a receive time out, whereupon gloo closes all connections of this rank and
every wait ends, here and on the other ranks. Entering and leaving a wait takes 2 us.
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

_TAG = 2**31 - 1  # of a message that is never sent
_AT_ONCE = datetime.timedelta(milliseconds=1)

_waiting: list[tuple[Any, int]] = []  # the group in which the main thread waits, and another rank in it
_closed: list[weakref.ref] = []  # groups whose connections were closed
_pipe: list[int] = []  # the descriptor that signals of this process write to


class Interruptible:
    """Let Ctrl-C end waits inside for ranks of a group; `other` is any rank of it but this one.

    It has no effect outside the main thread, if the program installed its own handler of SIGINT, or if another library
    uses `signal.set_wakeup_fd`.
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
    """Start the thread that waits for signals, and return the descriptor that wakes it up."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    _pipe.append(write)
    threading.Thread(target=_watch, args=(read,), name="fds-interrupts", daemon=True).start()
    return write


def _watch(read: int) -> None:
    while data := os.read(read, 64):
        # Nothing is closed if the program has its own handler; checked here, since it takes 4 us.
        if signal.SIGINT in data and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            for group, other in tuple(_waiting):
                _closed.append(weakref.ref(group))
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], other, _TAG).wait(_AT_ONCE)


os.register_at_fork(after_in_child=_pipe.clear)  # the thread does not exist in the child
