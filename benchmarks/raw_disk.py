"""What a disk gives to whoever asks it in the best way: threads that read and write whole blocks with O_DIRECT."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

MIB = 2**20


@attrs.frozen
class Manner:
    """How the disk is asked: in blocks of so many bytes, by so many threads at once for each direction."""

    block: int
    threads: int

    def __str__(self) -> str:
        return f"{self.block // MIB} MiB x {self.threads}"


MANNERS = [Manner(1 * MIB, 8), Manner(4 * MIB, 4), Manner(8 * MIB, 4)]


class RawFile:
    """A file without a name whose blocks have all been written once, open for direct reads and writes."""

    def __init__(self, folder: Path, num_bytes: int):
        self.size = -(-num_bytes // (8 * MIB)) * 8 * MIB
        self.fd = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, self.size)
        self.move(MANNERS[1], write=self.size)  # what was never written is read without the disk

    def move(self, manner: Manner, *, read: int = 0, write: int = 0) -> float:
        """Read and write so many bytes, both at the same time; return the seconds."""
        with ThreadPoolExecutor(2 * manner.threads) as pool:
            start = time.perf_counter()
            works = []
            for count, call in ((read, os.preadv), (write, os.pwritev)):
                works += [pool.submit(self._blocks, call, count, manner, i) for i in range(manner.threads) if count]
            for work in works:
                work.result()
            return time.perf_counter() - start

    def _blocks(self, call: Callable[..., int], count: int, manner: Manner, thread: int) -> None:
        buffer = memoryview(mmap.mmap(-1, manner.block))
        for at in range(thread * manner.block, count, manner.threads * manner.block):
            call(self.fd, [buffer], at % self.size)

    def close(self) -> None:
        """Give the file's blocks back."""
        os.close(self.fd)


def disk_bytes() -> tuple[int, int]:
    """Return the bytes that this process has had read from and written to disks (`/proc/self/io`)."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])
