"""Run as a program: two real ranks save in the background, and one of them, or its helper process, is killed.

Its helper is stopped, so that the save is certainly still running then. Prints one line a scenario; exits with an
error if the other rank hangs or says nothing, or if the last complete save does not load.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import fds
from fds.errors import StorageError
from tests.storage.holding import has_a_job, stopped_helper, until
from tests.storage.killing import die
from tests.storage.killing_ranks import check, ends, make_step, save, state_at, two_ranks

WIDTH = 40


def lost(root: Path, victim: int, *, helper: bool) -> None:
    dir = root / f"{victim}{helper}"
    dir.mkdir()
    save(dir, make_step(), 1, None, WIDTH)

    def body(rank: int, step: fds.Step) -> None:
        scratch = dir / f"scratch{rank}"
        scratch.mkdir()
        pid = stopped_helper(scratch) if rank == victim else None
        saving = fds.save_async(dir, state_at(step, 2, WIDTH), step, None, {"calls": 2})
        if pid is not None:
            until(lambda: has_a_job(pid))  # one that is killed before is replaced
            os.kill(pid, signal.SIGKILL) if helper else die()
        try:
            saving.wait()
        except StorageError as error:
            assert helper and error.what.startswith(f"rank {victim}: ") and "died" in error.got, error
        else:
            raise AssertionError("saved")

    statuses = ends(two_ranks(root / "meeting", body))
    if helper:
        assert statuses == [0, 0], statuses
    else:
        assert statuses[victim] == -signal.SIGKILL and statuses[1 - victim] == 7, statuses
    assert check(dir, 1, 1, WIDTH) == 1
    two_ranks_again = two_ranks(root / "meeting", lambda rank, step: save(dir, step, 3, None, WIDTH))
    assert ends(two_ranks_again) == [0, 0] and check(dir, 3, 3, WIDTH) == 3
    assert not (dir / ".saving").exists()
    print(f"rank {victim}{' by its helper' if helper else ''}: the last complete save loads", flush=True)


def main(root: Path) -> None:
    """Kill each rank, and the helper of each."""
    for victim in (0, 1):
        lost(root, victim, helper=False)
        lost(root, victim, helper=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
