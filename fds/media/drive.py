"""The drive of a `Disk`: its arena, its buffers, and the threads that read and write between them."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import weakref
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import attrs
from torch import Tensor

from fds.errors import DiskError
from fds.media.arena import Arena
from fds.media.mapping import PAGE, Buffers, Leaf, Slots, drop, leaf_of, map_slots, pages, view

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

    def __init__(self, count: int, memory: Any, clock: Clock) -> None:
        self.error: OSError | None = None  # the first
        self.failed_at = ""
        self._left = count
        self._memory = memory
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
            self._memory = None
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


@attrs.define(eq=False)
class Drive:
    """What is open for a `Disk`."""

    arena: Arena  # in which its leaves have their extents
    buffers: Buffers  # that they are read into
    threads: Threads  # that read and write
    timeout: float  # in seconds, without any progress
    staged: list[Request] = attrs.field(factory=list)  # requests that may still hold copies of what they write
    lock: threading.Lock = attrs.field(factory=threading.Lock)  # of that list

    def leaf(self, x: Tensor) -> Leaf | None:
        """Return what is known of a tensor that has whole pages of a file here to itself; None for any other."""
        record = leaf_of(x)
        if record is None or record.place is not self.arena or not x.is_contiguous() or not x.numel():
            return None
        start = x.storage_offset() * x.element_size()
        alone = start + x.nbytes == x.untyped_storage().nbytes() or x.nbytes % PAGE == 0
        return record if start % PAGE == 0 and alone else None

    def slots(self, sizes: list[int]) -> Slots:
        """Return aligned memory; where the buffers are full, after writes that hold some, at last beside them."""
        while (slots := self.buffers.take(sizes)) is None:
            with self.lock:
                self.staged[:] = [request for request in self.staged if not request.is_done()]
                if not self.staged:
                    return map_slots(sizes)
                oldest = self.staged.pop(0)
            with contextlib.suppress(OSError):  # whoever waits for that request is told
                oldest.wait(self.timeout)
        return slots

    def start(self, pairs: Sequence[tuple[Tensor, Tensor]], *, writes: bool) -> Request:
        """Begin to read leaves into aligned memory, or to write them from there: pairs of both, which stay alive."""
        file, runs = self.arena.file, list[list[int]]()
        places = sorted((x.data_ptr(), memory.data_ptr(), pages(x.nbytes)) for x, memory in pairs)
        for at, address, nbytes in places:
            if runs and runs[-1][0] + runs[-1][2] == at and runs[-1][1] + runs[-1][2] == address:
                runs[-1][2] += nbytes
            else:
                runs.append([at, address, nbytes])
        cuts = [
            (at + cut - file.base, address + cut, min(PIECE, nbytes - cut))
            for at, address, nbytes in runs
            for cut in range(0, nbytes, PIECE)
        ]
        for at, _, nbytes in runs:
            drop(at, nbytes)  # what somebody looked at through the mapping
        request = Request(len(cuts), pairs, self.threads.clock)
        self.threads.start([Piece(request, file.fd, at, view(address, n), writes) for at, address, n in cuts])
        return request

    def wait(self, request: Request, *, writes: bool) -> None:
        """Wait for a request. Raises `DiskError`."""
        verb, where = "write" if writes else "read", self.arena.file.directory
        try:
            is_done = request.wait(self.timeout)
        except OSError as error:
            got = f"{error.strerror} ({request.failed_at})"
            want = "a disk that reads and writes"
            hint = "look at what the system says of this disk: dmesg, smartctl"
            raise DiskError(f"the disk failed to {verb}", where=where, got=got, want=want, hint=hint) from error
        if not is_done:
            got, hint = f"nothing done in {self.timeout:g} s", "look at the disk, or give fds.disk a longer timeout"
            raise DiskError(
                f"the disk did not get on with what it was to {verb}", where=where, got=got, want="progress", hint=hint
            )
