"""Run as a program in a mount namespace of its own: saves onto a full disk, and onto one that is read-only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fds
from fds.errors import StorageError
from tests.storage.states import Template, num_calls, small_state


def refused(dir: Path, width: int, reason: str) -> None:
    before = {p: p.read_bytes() for p in dir.rglob("*") if p.is_file()}
    try:
        fds.save(dir, small_state(2, width), Template(small_state()))
    except StorageError as error:
        assert reason in error.got, error
        print(error, flush=True)
    else:
        raise AssertionError("saved")
    assert {p: p.read_bytes() for p in dir.rglob("*") if p.is_file()} == before
    assert not (dir / ".saving").exists()
    assert num_calls(fds.load(dir, Template(small_state()), {})[0]) == 1


if __name__ == "__main__":
    disk = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    fds.save(disk / "run", small_state(1), Template(small_state()))
    refused(disk / "run", 100_000, "No space left on device")  # within the tensors
    for left in range(0, 40_000, 4096):  # within the smaller files
        (disk / "ballast").write_bytes(b"")
        free = int(subprocess.check_output(["df", "--output=avail", "-B1", disk]).split()[-1])
        (disk / "ballast").write_bytes(bytes(max(free - left, 0)))
        try:
            refused(disk / "run", 3, "No space left on device")
        except AssertionError as error:
            assert str(error) == "saved" and left
            break
    else:
        raise AssertionError("never enough space")
    (disk / "ballast").unlink()
    fds.save(disk / "run", small_state(1), Template(small_state()))
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    refused(disk / "run", 3, "Read-only file system")
