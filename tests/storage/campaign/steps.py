"""Kills of processes that train with moments and masters on a disk: what goes on from the last save is the same run."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import struct
import time
from collections import Counter
from pathlib import Path

import attrs
import torch

import fds
from fds.storage.disk.folders import tags
from tests.bits import assert_same_bits
from tests.storage.campaign.outcomes import Row, Violation
from tests.storage.killing import in_a_child
from tests.storage.killing_ranks import ends, two_ranks

STEPS, EVERY, WIDTH = 30, 4, 256
NUMBER = struct.Struct("<qd")  # calls, and the loss of that call


@attrs.frozen
class Scenario:
    """Who trains, and how what they reach is saved."""

    ranks: int
    how: str  # "save" or "save_async"

    def __str__(self) -> str:
        return f"kill a step on disk: {self.how}, {self.ranks} rank{'s' * (self.ranks > 1)}"

    def train(self, root: Path, rank: int = 0) -> None:
        """Go on from the last save, if there is one, to the end, and write down every loss."""
        step, dir = make_step(self.ranks, root / "leaves"), root / "run"
        state = fds.load(dir, step, first(0))[0] if dir.exists() and tags(dir) else step.init(first)
        with open(root / f"losses{rank}", "ab") as file, contextlib.ExitStack() as saving:
            while (calls := int(state.calls)) < STEPS:
                x, y = batch_of(calls).chunk(2)
                state, metrics = step(state, (x.chunk(self.ranks)[rank], y.chunk(self.ranks)[rank]))
                os.write(file.fileno(), NUMBER.pack(calls, float(metrics["loss"])))
                if (calls + 1) % EVERY == 0 or calls + 1 == STEPS:
                    found = getattr(fds, self.how)(dir, state, step, keep=2)
                    saving.callback(found.wait) if self.how == "save_async" else None

    def start(self, root: Path) -> list[int]:
        """Start to train, and return the process ids."""
        if self.ranks == 1:
            return [in_a_child(lambda: self.train(root))]
        return two_ranks(root / "meeting", lambda rank, _: self.train(root, rank))

    def reached(self, root: Path) -> tuple[fds.State, dict[int, set[float]]]:
        """Return the last state as a plain step has it, and every loss that was computed, by calls."""
        losses: dict[int, set[float]] = {}
        for calls, loss in NUMBER.iter_unpack((root / "losses0").read_bytes()):
            losses.setdefault(calls, set()).add(loss)
        return fds.load(root / "run", make_step(1, None), first(0))[0], losses


def first(key: object) -> dict[str, torch.Tensor]:
    """Return the first parameters."""
    numbers = torch.Generator().manual_seed(0)
    return {name: torch.randn(WIDTH, WIDTH, generator=numbers) / 16 for name in "abcd"}


def batch_of(calls: int) -> torch.Tensor:
    """Return the rows of a call: inputs, then targets."""
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(calls))


def make_step(ranks: int, leaves: Path | None) -> fds.Step:
    """Return a step that keeps moments and masters in a folder; a plain one without it."""

    def loss(params, batch):
        x, y = batch
        for w in params.values():
            x = torch.dropout(torch.tanh(x @ w), 0.1, True)
        return (x - y).square().mean()

    shard = [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=1)] if ranks > 1 else []
    elsewhere = []
    if leaves is not None:
        leaves.mkdir(exist_ok=True)
        disk = fds.disk(leaves, buffer_bytes=2**20)
        elsewhere = [fds.offload(moments=disk, masters=disk), fds.donate()]
    return fds.compose(*shard, *elsewhere, fds.clip_by_global_norm(1.0), fds.adamw(1e-3))(loss)


def all_scenarios() -> list[Scenario]:
    """Return every scenario."""
    return [Scenario(ranks, how) for ranks in (1, 2) for how in ("save", "save_async")]


def kill(root: Path, scenario: Scenario, rounds: int, seed: int) -> Row:
    """Kill `rounds` times at random instants, then go on to the end. Raises `Violation` if that is not the same run."""
    draw, found = random.Random(f"{seed} {scenario}"), Counter[str]()
    shutil.rmtree(root, ignore_errors=True)
    with Violation.told(f"{scenario}, seed {seed}"):
        whole, killed = (root / name for name in ("whole", "killed"))
        _to_the_end(scenario, whole)
        for _ in range(rounds):
            killed.mkdir(exist_ok=True)
            found["killed" if _killed(scenario, killed, draw) else "ended before"] += 1
            left = [name for name in os.listdir(killed / "leaves") if not name.startswith("fds.lock")]
            assert not left, f"{left} is left of leaves"
            if _num_losses(killed) > 3 * STEPS:
                _check_same(scenario, killed, whole)
        _check_same(scenario, killed, whole)
    shutil.rmtree(root)
    return Row(str(scenario), rounds, dict(found))


def _killed(scenario: Scenario, root: Path, draw: random.Random) -> bool:
    """Kill a rank while it starts, steps or saves; return whether all others had not ended by then."""
    least = int(scenario.ranks > 1)  # a rank whose peer never came waits for its timeout
    after, pids = _num_losses(root) + draw.choice([least, 2, 4, 5, 6, 8]), scenario.start(root)
    until = time.monotonic() + 60
    while _num_losses(root) < after and any(os.path.exists(f"/proc/{pid}/exe") for pid in pids):
        assert time.monotonic() < until, "no step ends"
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.03))
    os.kill(draw.choice(pids), signal.SIGKILL)  # they are waited for later: nobody else has their ids
    return any(ends(pids))


def _num_losses(root: Path) -> int:
    """Return how many losses were computed."""
    try:
        return os.path.getsize(root / "losses0") // NUMBER.size
    except OSError:
        return 0


def _to_the_end(scenario: Scenario, root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    assert not any(ends(scenario.start(root))), "a run that nobody killed failed"


def _check_same(scenario: Scenario, root: Path, whole: Path) -> None:
    """Go on to the end, and compare what was reached with the run that was not killed; then forget it."""
    _to_the_end(scenario, root)
    (want, losses), (got, again) = scenario.reached(whole), scenario.reached(root)
    assert_same_bits(got, want)
    assert again == losses and all(len(one) == 1 for one in losses.values()), "another loss was computed"
    shutil.rmtree(root)
