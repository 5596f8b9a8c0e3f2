"""Run as a program, in a mount namespace of its own: a disk that is full, that is read-only, and a limit of file sizes.

    python -m tests.storage.campaign.disks FOLDER

What goes wrong in the process that writes for `save_async` is told like what goes wrong here. Prints a line of JSON.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.storage.campaign.errors import Scenario, calls_of, end_helpers

NAMESPACE = ("unshare", "--map-root-user", "--mount")
FREE = (0, 4096, 8192, 12288, 24576, 49152, 10**9)  # bytes that the disk has left; the last: as much as it wants


def save(dir: Path, how: str, ranks: int, calls: int) -> list:
    return Scenario(ranks, how, False, 0).save(dir, calls)


def refused(dir: Path, how: str, ranks: int, reason: int) -> bool:
    """Save, and return whether it was refused, for this reason on all ranks. Raises `AssertionError`."""
    told = save(dir, how, ranks, 2)
    if told[0] is None:
        assert not any(told) and calls_of(dir) == 2
        return False
    assert all(error is not None and os.strerror(reason) in error.got for error in told), told
    assert calls_of(dir) == 1 and not (dir / ".saving").exists()
    return True


def full_disks(disk: Path, found: Counter) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=True)
    ballast = disk / "ballast"
    for how in ("save", "save_async"):
        for ranks in (1, 3):
            last = None
            for free in FREE:
                ballast.unlink(missing_ok=True)
                shutil.rmtree(disk / "run", ignore_errors=True)
                assert not any(save(disk / "run", how, ranks, 1))
                there = shutil.disk_usage(disk).free
                ballast.write_bytes(bytes(max(there - free, 0)))
                last = refused(disk / "run", how, ranks, errno.ENOSPC)
                found["refused" if last else "saved"] += 1
            assert not last, "an empty disk was full"
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for how in ("save", "save_async"):
        (error,) = save(disk / "run", how, 1, 2)
        assert error is not None and os.strerror(errno.EROFS) in error.got, error
        found["refused"] += 1


def limited_sizes(dir: Path, found: Counter) -> None:
    """A file may have 20,000 bytes: here, and in the process aside, which inherits that."""
    for how in ("save", "save_async"):
        shutil.rmtree(dir, ignore_errors=True)
        assert not any(save(dir, "save", 1, 1))
        end_helpers()  # the next one starts under the limit
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            assert refused(dir, how, 1, errno.EFBIG), "more was written than may be"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        end_helpers()
        found["refused"] += 1
        assert not any(save(dir, how, 1, 3)) and calls_of(dir) == 3


if __name__ == "__main__":
    root, outcomes = Path(sys.argv[1]), Counter[str]()
    limited_sizes(root / "limited", outcomes)
    (root / "disk").mkdir()
    full_disks(root / "disk", outcomes)
    print(json.dumps(["full and read-only disks, limited sizes", outcomes.total(), dict(outcomes)]))
