"""Hold up what saves in the background, so that a test knows that a save is still running."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import signal
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from fds.storage import saving as background
from fds.storage.disk import aside, writer

LONG = 60  # seconds: only a test that fails waits so long


@contextlib.contextmanager
def held(*, after: bool = False) -> Iterator[threading.Event]:
    """Stop saves in the background before (or `after`) they write, until the event is set or the block ends."""
    go, plain = threading.Event(), background._write_aside

    def write(path, head, spans):
        found = plain(path, head, spans) if after else None
        assert go.wait(LONG)
        return found if after else plain(path, head, spans)

    with mock.patch.object(background, "_write_aside", write):
        try:
            yield go
        finally:
            go.set()


def helpers() -> list[int]:
    """Return the processes that this one has started to write files."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and writer.__file__.encode() in (path.parent / "cmdline").read_bytes():
                found.append(int(path.parent.name))
    return found


def stopped_helper(dir: Path) -> int:
    """Start a process that writes files and stop it, so that the next save waits for it; return its id."""
    with aside.process() as process:
        process.write(str(dir / "warm"), b"", [])
        pid = process._process.pid
    (dir / "warm").unlink()
    os.kill(pid, signal.SIGSTOP)
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")  # else it reads the job
    return pid


def has_a_job(pid: int) -> bool:
    """Return whether a stopped process that writes files was given one: it lies in its standard input, unread."""
    with open(f"/proc/{pid}/fd/0", "rb", buffering=0) as pipe:
        waiting = array.array("i", [0])
        fcntl.ioctl(pipe, termios.FIONREAD, waiting)
    return waiting[0] > 0


def until(true) -> None:
    """Wait for what must become true, and fail if it does not."""
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)
