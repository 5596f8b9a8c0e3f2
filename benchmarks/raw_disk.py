"""What a disk gives to whoever asks it in the best way: whole blocks with O_DIRECT, by threads.

Memory is in large pages, each block in the same place again and again: in pages of 4 KiB, new ones each time, this took
three times as long (537 ms where it takes 170).
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

MIB = 2**20
Block = tuple[bool, int, int]  # whether it is written; its place in the file; the number of its buffer


@attrs.frozen
class Manner:
    """How the disk is asked: in blocks of so many bytes, so many at once each way.

    It may use more memory than that, each several blocks in turn: so many `buffers` each way, None for `at_once`.
    """

    block: int
    at_once: int
    buffers: int | None = None

    def __str__(self) -> str:
        how = "" if self.buffers is None else f" in {2 * self.buffers * self.block // MIB} MiB"
        return f"{self.block // MIB} MiB x {self.at_once}{how}"


SHAPES = ((1, 2), (1, 8), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4))  # MiB of a block, how many at once
MANNERS = [Manner(block * MIB, n) for block, n in SHAPES]
LIKE_AN_UPDATE = Manner(2 * MIB, 1, buffers=12)  # in as much memory as fds has buffers
ROOM = 2 * max(m.block * (m.buffers or m.at_once) for m in [*MANNERS, LIKE_AN_UPDATE])  # bytes of buffers


class RawFile:
    """A file without a name whose blocks have all been written once, open for direct reads and writes."""

    def __init__(self, folder: Path, num_bytes: int):
        self.size = -(-num_bytes // (8 * MIB)) * 8 * MIB
        self.fd = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, self.size)
        room = mmap.mmap(-1, ROOM, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no large pages
        room.madvise(mmap.MADV_HUGEPAGE)
        self.room = memoryview(room)
        self.room[:: mmap.PAGESIZE] = bytes(ROOM // mmap.PAGESIZE)  # there before any clock runs
        self.move(MANNERS[4], write=self.size)  # what was never written is read without the disk

    def move(self, manner: Manner, *, read: int = 0, write: int = 0) -> float:
        """Read and write so many bytes, both at the same time; return the seconds."""
        work = [self._blocks(manner, count, writes) for writes, count in ((False, read), (True, write))]
        return _by_threads(self.fd, manner, work, self._buffer)

    def fastest(self, *, read: int = 0, write: int = 0, rounds: int = 5) -> dict[Manner, list[float]]:
        """Return the seconds of every manner, the fastest one first."""
        found: dict[Manner, list[float]] = {manner: [] for manner in MANNERS}
        for i in range(rounds):
            for manner in reversed(MANNERS) if i % 2 else MANNERS:
                found[manner].append(self.move(manner, read=read, write=write))
        return dict(sorted(found.items(), key=lambda one: sorted(one[1])[rounds // 2]))

    def close(self) -> None:
        """Give the file's blocks back."""
        os.close(self.fd)

    def _blocks(self, manner: Manner, count: int, writes: bool) -> list[Block]:
        buffers = manner.buffers or manner.at_once
        starts = enumerate(range(0, count, manner.block))
        return [(writes, at % self.size, writes * buffers + i % buffers) for i, at in starts]

    def _buffer(self, manner: Manner, i: int) -> memoryview:
        return self.room[i * manner.block : (i + 1) * manner.block]


def disk_bytes() -> tuple[int, int]:
    """Return the bytes that this process has had read from and written to disks (`/proc/self/io`)."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])


Buffer = Callable[[Manner, int], memoryview]


def _by_threads(fd: int, manner: Manner, work: Sequence[list[Block]], buffer: Buffer) -> float:
    def ask(blocks: Iterator[Block]) -> None:
        for writes, at, i in blocks:
            (os.pwritev if writes else os.preadv)(fd, [buffer(manner, i)], at)

    with ThreadPoolExecutor(2 * manner.at_once) as pool:
        start = time.perf_counter()
        turns = [itertools.islice(blocks, i, None, manner.at_once) for blocks in work for i in range(manner.at_once)]
        for one in [pool.submit(ask, blocks) for blocks in turns]:
            one.result()
        return time.perf_counter() - start
