"""Requests: bytes of a file to read or write, cut into pieces that threads have under way at once."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import weakref
from queue import SimpleQueue
from typing import Any

import attrs

PIECE = 2**21  # bytes: shorter ones cost more calls, longer ones leave the disk less to do at once


@attrs.define(eq=False)
class Clock:
    """When a disk was last known to get on."""

    ticked: float = attrs.field(factory=time.monotonic)

    def tick(self) -> None:
        """Note that a piece is done."""
        self.ticked = time.monotonic()


class Request:
    """Pieces that are waited for together, and what must live until the last of them is done."""

    def __init__(self, count: int, held: Any, clock: Clock) -> None:
        self.error: OSError | None = None  # the first
        self.failed_at = ""
        self._left = count
        self._held = held
        self._clock = clock
        self._lock = threading.Lock()
        self._all_done = threading.Event()
        if not count:
            self._all_done.set()

    def is_done(self) -> bool:
        """Return whether nothing is under way."""
        return self._all_done.is_set()

    def done(self, piece: Piece, error: OSError | None = None) -> None:
        """Count a piece as done, or as failed."""
        self._clock.tick()
        with self._lock:
            self._left -= 1
            if error is not None and self.error is None:
                self.error, self.failed_at = error, f"{len(piece.memory):,} bytes at {piece.offset:,} of its file"
            last = not self._left
        if last:
            self._held = None
            self._all_done.set()

    def wait(self, timeout: float) -> bool:
        """Wait until all is done, and return True; False if no piece gets done for so many seconds. Raises `OSError`.

        What is held stays held then, for the disk may still read or write it.
        """
        begun = time.monotonic()
        while not self._all_done.wait(max(0.0, max(begun, self._clock.ticked) + timeout - time.monotonic())):
            if time.monotonic() >= max(begun, self._clock.ticked) + timeout:
                return False
        if self.error is not None:
            raise self.error
        return True


@attrs.frozen(eq=False)
class Piece:
    """A part of a request."""

    request: Request
    fd: int
    offset: int
    memory: memoryview
    writes: bool

    def move(self) -> None:
        """Read or write all of it. Raises `OSError`."""
        memory, offset = self.memory, self.offset
        while len(memory):
            count = (os.pwritev if self.writes else os.preadv)(self.fd, [memory], offset)
            if not count:
                raise OSError(errno.EIO, f"nothing was {'written' if self.writes else 'read'}")
            memory, offset = memory[count:], offset + count

    def forget(self) -> None:
        """Write what the page cache has of it, and let it go. Raises `OSError`."""
        if self.writes:
            os.fdatasync(self.fd)
        with contextlib.suppress(OSError):
            os.posix_fadvise(self.fd, self.offset, len(self.memory), os.POSIX_FADV_DONTNEED)


class Threads:
    """Threads that read and write, of which each has one piece under way; they end with this.

    With direct I/O they are as fast as io_uring (benchmarks/results/2026-11-23-offload-update.md).

    Args:
        depth: how many.
        direct: whether the files are open for direct I/O; else the page cache gives back what was read and written.
    """

    def __init__(self, depth: int, *, direct: bool) -> None:
        self.clock = Clock()
        self._queue: SimpleQueue[Piece | None] = SimpleQueue()
        for _ in range(depth):  # daemons: a disk that hangs must not keep the process from ending
            threading.Thread(target=_work, args=(self._queue, direct), name="fds-disk", daemon=True).start()
        weakref.finalize(self, _end, self._queue, depth)

    def start(self, pieces: list[Piece]) -> None:
        """Begin with pieces; each ends with `request.done`, whatever happens."""
        for piece in pieces:
            self._queue.put(piece)


def _work(queue: SimpleQueue[Piece | None], direct: bool) -> None:
    while (piece := queue.get()) is not None:
        failed = None
        try:
            if piece.request.error is None:
                piece.move()
            if not direct:
                piece.forget()
        except OSError as error:
            failed = error
        except Exception as error:  # whoever waits is to hear of it, and the thread goes on
            failed = OSError(errno.EIO, f"{type(error).__name__}: {error}")
        piece.request.done(piece, failed)
        del piece  # the next one may be long in coming


def _end(queue: SimpleQueue[Piece | None], depth: int) -> None:
    for _ in range(depth):
        queue.put(None)
