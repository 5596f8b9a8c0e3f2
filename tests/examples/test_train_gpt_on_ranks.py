"""The main job on two ranks: the curve of one, stopped and resumed on another number, and a rank that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.examples.runs import as_ranks, command, fresh, lines, saved
from tests.programs import Program

Run = subprocess.Popen | Program
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)


def until(reached: Callable[[], bool], run: Run, seconds: float = 90.0) -> None:
    """Wait until something is reached, or the run has ended."""
    end = time.monotonic() + seconds
    while run.poll() is None and not reached() and time.monotonic() < end:
        time.sleep(0.005)
    assert run.poll() is None and reached(), run.communicate(timeout=10)[0] if run.poll() is not None else "too slow"


def logged(out: Path) -> int:
    """Count the lines of a log that may not be there yet."""
    log = out / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def ranks_of(run: Run) -> list[int]:
    """Return the processes that a launcher started, in the order of the ranks."""
    return [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """Tell whether there is such a process, zombies left out."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_a_run_on_two_ranks_is_stopped_resumed_on_one_and_follows_the_curve_of_one(tmp_path: Path, book: Path):
    options = [
        "--quick",
        "--data",
        book,
        "--steps",
        60,
        "--eval-every",
        20,
        "--eval-rows",
        7,
        "--accumulate",
        2,
        "--sample",
        3,
        "--dtype",
        "float32",
    ]
    out = tmp_path / "shared"
    shared = command(*options, "--ranks", 2, "--stage", 3, "--out", out)
    until(lambda: logged(out) > 0, shared)
    shared.send_signal(signal.SIGINT)
    said, _ = shared.communicate(timeout=90)
    assert shared.returncode == 130, said
    assert "2 ranks of cpu, stage 3" in said
    assert "Traceback" not in said
    assert said.count(f"--resume {out}") == 1
    assert 0 < logged(out) < 63
    resumed, alone = command("--resume", out, "--ranks", 1), command(*options, "--out", tmp_path / "alone")
    for run in (resumed, alone):
        said, _ = run.communicate(timeout=90)
        assert run.returncode == 0, said
    found, expected = lines(out), lines(tmp_path / "alone")
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3), (ours, theirs)


def test_a_run_that_lost_a_rank_is_restarted_by_torchrun_and_equals_one_that_did_not(tmp_path: Path, book: Path):
    options = ["--quick", "--data", book, "--steps", 90, "--save-every", 15, "--eval-every", 45, "--sample", 3]
    options += ["--dtype", "float32"]  # else each run takes the one that it measures to be the fastest
    killed = fresh(*options, "--out", tmp_path / "killed", by=(*TORCHRUN, "--max-restarts", 1))
    whole = as_ranks(2, *options, "--out", tmp_path / "whole")
    until(lambda: logged(tmp_path / "killed") > 20, killed)
    first = ranks_of(killed)
    os.kill(first[1], signal.SIGKILL)
    until(lambda: set(first).isdisjoint(then := ranks_of(killed)) and len(then) == 2, killed)
    second = ranks_of(killed)
    said, _ = killed.communicate(timeout=90)
    assert killed.returncode == 0, said
    assert "rank 1 was lost\n  where: rank 0, in " in said
    assert "Traceback" not in said
    assert not any(map(is_running, first + second))
    for rank in whole:
        said, _ = rank.communicate(timeout=90)
        assert rank.returncode == 0, said
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    ours, theirs = saved(tmp_path / "killed"), saved(tmp_path / "whole")
    assert len({name.split(":")[0] for name in ours}) == 2
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
