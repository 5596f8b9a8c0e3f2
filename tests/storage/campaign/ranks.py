"""Ranks: real ones that stop, are interrupted, are missing or come twice; the others are told in time, and end."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import fds
from fds.errors import FdsError, RankError
from fds.storage.disk import aside
from tests import ranks
from tests.storage.campaign.outcomes import Row, Violation
from tests.storage.holding import until

TIMEOUT = 4.0  # seconds that ranks wait for each other
LATE = 6.0  # seconds beyond it that a busy machine may take
PARAMS = {"w": torch.ones(1000)}


def begin(dir: str, stage: int = 2, rate: float = 0.1) -> tuple[fds.Step, fds.State]:
    meet(dir)
    fds.init_distributed("gloo", timeout=TIMEOUT)
    sharding = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)
    step = fds.compose(sharding, fds.adamw(rate))(lambda p, b: (p["w"] * b).sum())
    return step, step.init(PARAMS)


def meet(dir: str) -> None:
    """Wait until every rank has started: on a busy machine that may take longer than ranks wait for each other."""
    here = Path(dir).parent / f"met-at-{os.environ['MASTER_PORT']}"
    here.mkdir(parents=True, exist_ok=True)
    (here / os.environ["RANK"]).touch()
    until(lambda: len(list(here.iterdir())) == int(os.environ["WORLD_SIZE"]))


def told(call: Callable[[], object]) -> None:
    """Print what a call is refused with, and how many seconds that took."""
    started = time.monotonic()
    try:
        print("done:", call(), flush=True)
    except FdsError as error:
        print(f"{type(error).__name__}: {error.what} [{time.monotonic() - started:.1f}]", flush=True)


def stop_after_save_async(dir: str, how: str) -> None:
    """Rank 1 stops while its part is to be written; rank 0 waits for the save, or fails for another reason."""
    step, state = begin(dir)
    saving = fds.save_async(dir, state, step)
    if step.everyone is not None and step.everyone.index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "raise":
        raise KeyError("something else")
    told(saving.wait)


def press_ctrl_c(dir: str, stage: int, delay: float) -> None:
    """Ctrl-C comes to all ranks while they train; then they save, unless another was interrupted and ended before."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    step, state = begin(dir, stage)
    pressed = threading.Timer(0.2 + delay, os.kill, (os.getpid(), signal.SIGINT))
    pressed.start()
    try:
        while True:
            state, _ = step(state, torch.ones(1000))
    except KeyboardInterrupt:
        told(lambda: fds.save(dir, state, step))
    except RankError as error:
        pressed.cancel()
        print(f"RankError: {error.what}", flush=True)


def kill_the_idle_writer(dir: str) -> None:
    step, state = begin(dir)
    for calls in range(3):
        told(fds.save_async(dir, state, step, f"at{calls}").wait)
        for one in aside._idle:
            assert one._process is not None
            one._process.kill()


def compose_differently(stage: int, where: str, dir: str) -> None:
    meet(dir)
    fds.init_distributed("gloo", timeout=TIMEOUT)
    rank = fds.mesh(dp=-1).rank
    more = {
        "rate": [],
        "clip": [fds.clip_by_global_norm(1.0)] * rank,
        "freeze": [fds.freeze("wb"[rank])],
        "skip": [fds.skip_nonfinite()] * rank,
    }[where]
    rate = 0.1 + (where == "rate") * rank
    sharding = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)
    step = fds.compose(sharding, *more, fds.adamw(rate))(lambda p, b: ((p["w"] + p["b"]) * b).sum())
    told(lambda: step.init({**PARAMS, "b": torch.ones(1000)}))


def join(places: dict[int, int], later: dict[int, float], stays: float) -> None:
    """Join as the rank that a process stands for: one may be missing, or there twice, or come later."""
    process = int(os.environ["RANK"])
    time.sleep(later.get(process, 0.0))
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(places[process]), "3"
    told(lambda: fds.init_distributed("gloo", timeout=TIMEOUT))
    time.sleep(stays)


def _ran(what: str, function: Callable, *args: object, world_size: int = 2, limit: float) -> list[tuple]:
    """Return exit status and output of each rank; none may still be there when the time is over."""
    with Violation.told(what):
        results = ranks.spawn(function, *args, world_size=world_size, timeout=limit + LATE)
        assert all(code != -signal.SIGKILL for code, _ in results) or function is stop_after_save_async, results
        seconds = [float(n) for _, text in results for n in re.findall(r"\[(\d+\.\d)\]$", text, re.MULTILINE)]
        assert max(seconds, default=0.0) < limit + LATE, results
    return results


def all_rows(root: Path, rounds: int = 3) -> Iterator[Row]:
    """Yield what came of every fault. Raises `Violation`."""
    root.mkdir()
    yield _stopped(root, "wait", "RankError: rank 1 did not write its part of the save in time")
    yield _stopped(root, "raise", "KeyError")
    found = Counter[str]()
    for stage in range(4):
        for i in range(rounds):
            what = f"Ctrl-C on all ranks, then save, stage {stage}"
            for code, text in _ran(what, press_ctrl_c, str(root / "keys"), stage, 0.003 * i, limit=TIMEOUT):
                with Violation.told(what):
                    assert code == 0 and ("done:" in text or "RankError" in text or "StorageError" in text), text
                found["saved" if "done:" in text else text.partition(":")[0]] += 1
    yield Row("Ctrl-C on all ranks, then save", 8 * rounds, dict(found))
    with Violation.told("an idle writer is killed"):
        for code, text in _ran("an idle writer", kill_the_idle_writer, str(root / "killed"), limit=2 * TIMEOUT):
            assert code == 0 and text.count("done:") == 3, text
    yield Row("kill the idle process that writes: save_async, 2 ranks", 4, {"saved": 6})
    yield _composed(root)
    yield from _joined()


def _stopped(root: Path, how: str, want: str) -> Row:
    what = f"rank 1 stops while it saves in the background, rank 0 goes on to {how}"
    results = _ran(what, stop_after_save_async, str(root / how), how, limit=2 * TIMEOUT)
    with Violation.told(what):
        (code, text), (other, _) = results
        assert want in text and code == (0 if how == "wait" else 1), (code, text)
        assert other == -signal.SIGKILL, "it was to be stopped until the end"
    return Row(what, 1, {want.partition(":")[0]: 1})


def _composed(root: Path) -> Row:
    found = Counter[str]()
    for stage in range(4):
        for where in ("rate", "clip", "freeze", "skip"):
            what = f"another {where} on one rank, stage {stage}"
            for code, text in _ran(what, compose_differently, stage, where, str(root), limit=TIMEOUT):
                with Violation.told(what):
                    assert code == 0 and text.startswith("ComposeError: the ranks have composed"), text
                found["ComposeError"] += 1
    return Row("another composition on one rank, stages 0 to 3", 16, dict(found))


def _joined() -> Iterator[Row]:
    came = {0: 0, 1: 1, 2: 2}
    for what, places, later, stays, want in (
        ("rank 2 is not started", {0: 0, 1: 1}, {}, 0.0, ["RankError: rank 2 did not arrive"] * 2),
        ("rank 0 is not started", {0: 1, 1: 2}, {}, 0.0, ["RankError: rank 0 did not arrive"] * 2),
        ("two processes are rank 1", {0: 0, 1: 1, 2: 1}, {2: 1.0}, 0.0, ["MeshError: two processes are rank 1"] * 3),
        (
            "a fourth process is rank 1 as well",
            {**came, 3: 1},
            {3: 2.0},
            3.0,
            ["done:", "done:", "done:", "MeshError: two processes are rank 1"],
        ),
    ):
        results = _ran(what, join, places, later, stays, world_size=len(places), limit=TIMEOUT + stays)
        with Violation.told(what):
            for (code, text), start in zip(results, want, strict=True):
                assert code == 0 and start in text, results
        yield Row(what, 1, dict(Counter(text.partition(":")[0] for text in want)))
