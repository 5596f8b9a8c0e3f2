"""Requests: bytes of a file to read or write, cut into pieces that a backend has under way at once."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import attrs

PIECE = 2**21  # bytes: shorter ones cost more calls, longer ones leave the disk less to do at once


@attrs.define(eq=False)
class Clock:
    """When a backend was last known to get on."""

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

    def after(self, nbytes: int) -> Piece:
        """Return what is left when so many bytes are done. Raises `OSError` where it was none."""
        if not nbytes:
            raise OSError(5, f"nothing was {'written' if self.writes else 'read'}")
        return attrs.evolve(self, offset=self.offset + nbytes, memory=self.memory[nbytes:])


class Backend(Protocol):
    """What reads and writes pieces."""

    name: str
    clock: Clock

    def start(self, pieces: list[Piece]) -> None:
        """Begin with pieces; each ends with `request.done`, whatever happens."""
        ...
