"""Count what a save asks of the file system, from whichever thread, and let one request go wrong."""

from __future__ import annotations

import builtins
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from unittest import mock

CALLS = ("mkdir", "rename", "replace", "fsync", "pwrite", "ftruncate", "rmdir", "unlink")


@contextlib.contextmanager
def at_request(n: int, act: Callable[[str], None]) -> Iterator[list[str]]:
    """Call `act(name of the request)` in place of request number `n`, counted from 0; give the list of all made.

    What closes a file has closed it when `act` is called, as the kernel has when it reports an error.
    """
    made: list[str] = []
    lock = threading.Lock()

    def count(name: str) -> None:
        with lock:
            made.append(name)
            hit = len(made) == n + 1
        if hit:
            act(name)

    def counted(name: str, call: Callable) -> Callable:
        def request(*args, **kwargs):
            count(name)
            return call(*args, **kwargs)

        return request

    def counted_open(path, mode="r", *args, **kwargs):
        if "r" in mode:
            return plain_open(path, mode, *args, **kwargs)
        count("create")
        file = plain_open(path, mode, *args, **kwargs)
        return mock.MagicMock(
            wraps=file,
            write=counted("write", file.write),
            flush=counted("flush", file.flush),
            __enter__=lambda self: self,
            __exit__=lambda self, *error: file.close(),
        )

    def counted_os_open(path, flags, *args, **kwargs):
        count("create" if flags & os.O_CREAT else "open")
        return plain_os_open(path, flags, *args, **kwargs)

    def counted_close(fd):
        plain_close(fd)
        if sys._getframe(1).f_globals["__name__"] != "shutil":  # rmtree would close twice
            count("close")

    plain_open, plain_os_open, plain_close = builtins.open, os.open, os.close
    with contextlib.ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(mock.patch.object(os, name, counted(name, getattr(os, name))))
        stack.enter_context(mock.patch.object(os, "open", counted_os_open))
        stack.enter_context(mock.patch.object(os, "close", counted_close))
        stack.enter_context(mock.patch.object(builtins, "open", counted_open))
        yield made
