"""Requests: what a save asks of the file system, from whichever thread, in the hands of a test."""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import io
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

CALLS = ("mkdir", "rename", "replace", "rmdir", "unlink", "open", "write", "ftruncate", "fsync")

Act = Callable[[int, str, Callable[[], Any]], Any]  # number of the request, its name, what makes it


@contextlib.contextmanager
def in_hand(act: Act) -> Iterator[list[str]]:
    """Call `act(number, name, make)` in place of every request; it returns what `make()` returns, or raises.

    Gives the list of all requests so far. A file that is closed is closed before `act` hears of it, as the kernel has
    closed it when it reports an error.
    """
    made: list[str] = []
    written: set[int] = set()  # open files that something was written to: no others may fail to close
    lock = threading.Lock()

    def ask(name: str, make: Callable[[], Any]) -> Any:
        with lock:
            number = len(made)
            made.append(name)
        return act(number, name, make)

    def asked(name: str, call: Callable) -> Callable:
        return lambda *args, **kwargs: ask(name, lambda: call(*args, **kwargs))

    def close(fd):
        wrote = fd in written
        written.discard(fd)  # before another thread opens a file under this number
        plain_close(fd)
        if wrote:
            ask("close", lambda: None)

    def pwrite(fd, *args):
        written.add(fd)
        return ask("pwrite", lambda: plain_pwrite(fd, *args))

    def opened(path, mode="r", *args, **kwargs):
        if isinstance(path, int) or not set(mode) & set("wax+"):
            return plain_open(path, mode, *args, **kwargs)
        return _File(ask("create", lambda: plain_open(path, mode, *args, **kwargs)), ask)

    plain_open, plain_close, plain_pwrite = builtins.open, os.close, os.pwrite
    with contextlib.ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(mock.patch.object(os, name, asked(name, getattr(os, name))))
        stack.enter_context(mock.patch.object(os, "close", close))
        stack.enter_context(mock.patch.object(os, "pwrite", pwrite))
        stack.enter_context(mock.patch.object(fcntl, "flock", asked("flock", fcntl.flock)))
        stack.enter_context(mock.patch.object(builtins, "open", opened))
        stack.enter_context(mock.patch.object(io, "open", opened))
        yield made


class _File:
    """An open file whose writes are requests; so is its closing, if something was written to it."""

    def __init__(self, file: Any, ask: Callable):
        self._file, self._ask, self._written = file, ask, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> Any:
        self._written = True
        return self._ask("write", lambda: self._file.write(data))

    def flush(self) -> None:
        self._ask("flush", self._file.flush)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()
        if self._written:
            self._ask("close", lambda: None)


class Killed(BaseException):
    """The process is no more: nothing that it asks for after this happens."""


def kill_at(n: int) -> Act:
    """Return what lets nothing happen from request `n` on, in any thread, as if the process had been killed there."""

    def act(number: int, name: str, make: Callable[[], Any]) -> Any:
        if number >= n:
            raise Killed
        return make()

    return act


def close_locks() -> None:
    """Close the locks of a process that was killed, as the kernel does."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)").endswith(".lock"):
                os.close(fd)


def fail_at(n: int, code: int) -> Act:
    """Return what answers request `n` with an error of the file system."""

    def act(number: int, name: str, make: Callable[[], Any]) -> Any:
        if number == n:
            raise OSError(code, os.strerror(code))
        return make()

    return act
