"""Pieces by io_uring: the kernel has them under way, and one thread submits them and collects what is done."""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections import deque

import attrs
import liburing

from fds.media.requests import Clock, Piece


class Uring:
    """A ring and the thread that has it to itself; they end with this. Raises `OSError` where the kernel gives none.

    Args:
        depth: how many pieces the kernel has at once.
    """

    name = "io_uring"

    def __init__(self, depth: int) -> None:
        self.clock = Clock()
        self._waiting: deque[Piece | None] = deque()
        self._awake = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            ring = liburing.Ring()
            liburing.io_uring_queue_init(depth, ring, 0)
            liburing.io_uring_register_eventfd(ring, self._awake)
        except BaseException:
            os.close(self._awake)
            raise
        work = _Work(ring, depth, self._waiting, self._awake).run
        threading.Thread(target=work, name="fds-disk", daemon=True).start()
        weakref.finalize(self, _end, self._waiting, self._awake, os.getpid())

    def start(self, pieces: list[Piece]) -> None:
        """Begin with pieces."""
        self._waiting.extend(pieces)
        os.eventfd_write(self._awake, 1)


@attrs.define(eq=False)
class _Work:
    """What the thread knows."""

    ring: liburing.Ring
    depth: int
    waiting: deque[Piece | None]  # in the end None
    awake: int  # an eventfd: the kernel's when a piece is done, ours when one waits
    under_way: dict[int, tuple[Piece, liburing.Iovec]] = attrs.field(factory=dict)
    prepared: deque[int] = attrs.field(factory=deque)  # those under way that the kernel did not take yet
    number: int = 0
    ends: bool = False
    failed: OSError | None = None  # why the ring takes nothing any more

    def run(self) -> None:
        while not (self.ends and not self.under_way):
            os.eventfd_read(self.awake)  # without the interpreter's lock, which liburing's own functions keep
            try:
                while self._collected():
                    pass
                self._prepare()
                self._submit()
            except Exception as error:  # whoever waits is to hear of it, now and later
                self._fail(error)
        liburing.io_uring_queue_exit(self.ring)
        os.close(self.awake)

    def _collected(self) -> bool:
        """Take one piece that is done, if there is one."""
        cqe = liburing.Cqe()
        try:
            liburing.io_uring_peek_cqe(self.ring, cqe)
        except BlockingIOError:
            return False
        entry = cqe[0]
        assert entry is not None
        piece, _ = self.under_way.pop(entry.user_data)
        failed = None
        try:
            rest = piece.after(entry.res or 0)
        except (BlockingIOError, InterruptedError):
            rest = piece
        except OSError as error:
            rest, failed = None, error
        liburing.io_uring_cqe_seen(self.ring, entry)
        if rest is not None and len(rest.memory):
            self.waiting.appendleft(rest)
        else:
            piece.request.done(piece, failed)
        return True

    def _prepare(self) -> None:
        """Get ready as many pieces as the kernel may have; once it takes none, let all fail."""
        while self.waiting and (self.failed is not None or len(self.under_way) < self.depth):
            piece = self.waiting.popleft()
            if piece is None:
                self.ends = True
            elif self.failed is not None or piece.request.error is not None:
                piece.request.done(piece, self.failed)
            else:
                self.number += 1
                iovec = liburing.Iovec([piece.memory])  # pyright: ignore[reportCallIssue]  (which is not in its stub)
                self.under_way[self.number] = piece, iovec
                self.prepared.append(self.number)
                entry = liburing.io_uring_get_sqe(self.ring)
                assert entry is not None  # there are `depth`
                prepare = liburing.io_uring_prep_writev if piece.writes else liburing.io_uring_prep_readv
                prepare(entry, piece.fd, iovec, piece.offset)
                entry.user_data = self.number

    def _submit(self) -> None:
        """Give the kernel what is ready."""
        if not self.prepared:
            return
        try:
            for _ in range(liburing.io_uring_submit(self.ring) or 0):
                self.prepared.popleft()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EBUSY, errno.EINTR):
                raise
        if self.prepared:
            time.sleep(0.001)  # the kernel is short of memory
            os.eventfd_write(self.awake, 1)

    def _fail(self, error: Exception) -> None:
        """Let everything fail that the kernel does not have."""
        if self.failed is None:
            text = f"io_uring: {getattr(error, 'strerror', None) or repr(error)}; backend='threads' does without it"
            self.failed = OSError(getattr(error, "errno", None) or errno.EIO, text)
        while self.prepared:
            piece, _ = self.under_way.pop(self.prepared.popleft())
            piece.request.done(piece, self.failed)
        self._prepare()


def _end(waiting: deque[Piece | None], awake: int, owner: int) -> None:
    if os.getpid() == owner:  # a fork has no such thread
        waiting.append(None)
        os.eventfd_write(awake, 1)
