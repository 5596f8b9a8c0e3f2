"""Count what a save asks of the file system, and let one request go wrong."""

from __future__ import annotations

import builtins
import contextlib
import os
from collections.abc import Callable, Iterator
from unittest import mock

CALLS = ("mkdir", "rename", "replace", "fsync", "open", "rmdir", "unlink")


@contextlib.contextmanager
def at_request(n: int, act: Callable[[str], None]) -> Iterator[list[str]]:
    """Call `act(name of the request)` in place of request number `n`, counted from 0; give the list of all made."""
    made: list[str] = []

    def count(name: str) -> None:
        made.append(name)
        if len(made) == n + 1:
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
            wraps=file, write=counted("write", file.write), flush=counted("flush", file.flush),
            __enter__=lambda self: self, __exit__=lambda self, *error: file.close(),
        )  # fmt: skip

    plain_open = builtins.open
    with contextlib.ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(mock.patch.object(os, name, counted(name, getattr(os, name))))
        stack.enter_context(mock.patch.object(builtins, "open", counted_open))
        yield made
