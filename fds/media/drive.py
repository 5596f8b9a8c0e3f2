"""The drive of a `Disk`: its arena, its buffers, and what reads and writes between them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import attrs
from torch import Tensor

from fds.errors import DiskError
from fds.media.arena import Arena
from fds.media.buffers import Buffers, Slots, fresh
from fds.media.mapping import PAGE, drop, pages
from fds.media.requests import PIECE, Piece, Request, Threads
from fds.media.tensors import Leaf, leaf_of, view


@attrs.define(eq=False)
class Drive:
    """What is open for a `Disk`.

    Attributes:
        arena: in which its leaves have their extents.
        buffers: that they are read into.
        threads: that read and write.
        timeout: in seconds, without any progress.
        staged: requests that may still hold copies of what they write.
    """

    arena: Arena
    buffers: Buffers
    threads: Threads
    timeout: float
    staged: list[Request] = attrs.field(factory=list)
    lock: threading.Lock = attrs.field(factory=threading.Lock)  # of that list

    def leaf(self, x: Tensor) -> Leaf | None:
        """Return what is known of a tensor that has whole pages of a file here to itself; None for any other."""
        known = leaf_of(x)
        if known is None or known.place is not self.arena or not x.is_contiguous() or not x.numel():
            return None
        start = x.storage_offset() * x.element_size()
        alone = start + x.nbytes == x.untyped_storage().nbytes() or x.nbytes % PAGE == 0
        return known if start % PAGE == 0 and alone else None

    def slots(self, sizes: list[int]) -> Slots:
        """Return aligned memory; where the buffers are full, after writes that hold some, at last beside them."""
        while (found := self.buffers.take(sizes)) is None:
            with self.lock:
                self.staged[:] = [one for one in self.staged if not one.is_done()]
                if not self.staged:
                    return fresh(sizes)
                oldest = self.staged.pop(0)
            with contextlib.suppress(OSError):  # whoever waits for that request is told
                oldest.wait(self.timeout)
        return found

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
            raise DiskError(
                f"the disk failed to {verb}",
                where=where,
                got=f"{error.strerror} ({request.failed_at})",
                want="a disk that reads and writes",
                hint="look at what the system says of this disk: dmesg, smartctl",
            ) from error
        if not is_done:
            raise DiskError(
                f"the disk did not get on with what it was to {verb}",
                where=where,
                got=f"nothing done in {self.timeout:g} s",
                want="progress",
                hint="look at the disk, or give fds.disk a longer timeout",
            )
