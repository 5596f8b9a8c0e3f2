"""Pieces by threads, of which each has one under way."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from queue import SimpleQueue

from fds.media.requests import Clock, Piece


class Threads:
    """Threads that read and write; they end with this.

    Args:
        depth: how many.
        direct: whether the files are open for direct I/O; else the page cache gives back what was read and written.
    """

    name = "threads"

    def __init__(self, depth: int, *, direct: bool = True) -> None:
        self.clock = Clock()
        self._queue: SimpleQueue[Piece | None] = SimpleQueue()
        for _ in range(depth):  # daemons: a disk that hangs must not keep the process from ending
            threading.Thread(target=_work, args=(self._queue, direct), name="fds-disk", daemon=True).start()
        weakref.finalize(self, _end, self._queue, depth)

    def start(self, pieces: list[Piece]) -> None:
        """Begin with pieces."""
        for piece in pieces:
            self._queue.put(piece)


def _work(queue: SimpleQueue[Piece | None], direct: bool) -> None:
    while (piece := queue.get()) is not None:
        failed = None
        try:
            if piece.request.error is None:
                _transfer(piece)
            if not direct:
                _forget(piece)
        except OSError as error:
            failed = error
        except Exception as error:  # whoever waits is to hear of it, and the thread goes on
            failed = OSError(errno.EIO, f"{type(error).__name__}: {error}")
        piece.request.done(piece, failed)
        del piece  # the next one may be long in coming


def _transfer(piece: Piece) -> None:
    while len(piece.memory):
        one = [piece.memory]
        count = (os.pwritev if piece.writes else os.preadv)(piece.fd, one, piece.offset)
        piece = piece.after(count)


def _forget(piece: Piece) -> None:
    """Write what the page cache has of a piece, and let it go."""
    if piece.writes:
        os.fdatasync(piece.fd)
    with contextlib.suppress(OSError):
        os.posix_fadvise(piece.fd, piece.offset, len(piece.memory), os.POSIX_FADV_DONTNEED)


def _end(queue: SimpleQueue[Piece | None], depth: int) -> None:
    for _ in range(depth):
        queue.put(None)
