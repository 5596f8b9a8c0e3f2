"""A folder's disk: free space, and how fast a save would be written and read."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator

from fds.command_line.doctor.finding import Finding, Settings

MIB = 2**20
PIECE, PIECES = 4 * MIB, 16
LEAST = 2**30  # bytes that should be free


def disk(settings: Settings) -> Iterator[Finding]:
    """Find the free space of the folder, and write and read a file in it, which is removed again."""
    where = str(settings.dir)
    try:
        free = shutil.disk_usage(settings.dir).free
    except OSError as error:
        yield Finding(
            where, f"cannot be used: {error.strerror}", "problem", "make it, or pass another: fds doctor --dir"
        )
        return
    low = free < LEAST
    advice = "a save with Adam and float32 takes 12 bytes a parameter: fds.save(..., keep=1), or another folder"
    yield Finding(where, f"{free / 2**30:,.1f} GiB free", "note" if low else "ok", advice * low, {"free_bytes": free})
    try:
        yield _speed(settings) if not settings.quick else _writable(settings)
    except OSError as error:
        advice = "saves fail there: pass a folder that you may write to"
        yield Finding("writing", f"failed: {error.strerror}", "problem", advice)


def _writable(settings: Settings) -> Finding:
    with tempfile.TemporaryFile(dir=settings.dir):
        return Finding("writing", "allowed")


def _speed(settings: Settings) -> Finding:
    piece, total = os.urandom(PIECE), PIECE * PIECES
    with tempfile.TemporaryFile(dir=settings.dir, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(PIECES):
            file.write(piece)
        os.fsync(file.fileno())
        wrote = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):  # so that it is the disk that is read, where the kernel agrees
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start = time.perf_counter()
        same = all(file.read(PIECE) == piece for _ in range(PIECES))
        read = time.perf_counter() - start
    values = {"bytes": total, "write_bytes_per_s": total / wrote, "read_bytes_per_s": total / read}
    found = f"writes {total / wrote / MIB:,.0f} MiB/s with fsync, reads {total / read / MIB:,.0f} MiB/s"
    if not same:
        return Finding("speed", "what was read is not what was written", "problem", "do not save there", values)
    slow = total / wrote < 50 * MIB
    advice = "fds.save_async lets steps go on meanwhile; or save to a local disk"
    return Finding("speed", found, "note" if slow else "ok", advice * slow, values)
