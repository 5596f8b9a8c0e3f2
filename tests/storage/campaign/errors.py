"""Errors: every request of a save to the file system fails once, and writes come out short; nothing else may."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
from collections import Counter
from pathlib import Path
from unittest import mock

import attrs
import torch

import fds
from fds import tree
from fds.errors import StorageError
from fds.storage.disk import aside
from fds.storage.disk.folders import tags
from tests.storage.campaign.outcomes import Row, Violation
from tests.storage.campaign.requests import fail_at, in_hand
from tests.storage.topologies import Topology

PARAMS = {"w": torch.zeros(3000), "b": torch.zeros(3)}
CODES = (errno.ENOSPC, errno.EIO)
# A file system may have no locks, nothing is lost with the end of one, and what is cleared up at the end may stay until
# the next save; the first directory that is made is there. (That files close is for test_writer.py.)
HARMLESS = ("flock", "open", "close", "unlink", "rmdir")
SHORT = (1, 0.5, -1)  # of what a write is given: a byte, half of it, all but a byte


@attrs.frozen
class Scenario:
    """Who saves how, and what it is told."""

    ranks: int
    how: str  # "save" or "save_async"
    anew: bool  # a new tag beside another, of which two are kept, or the same again
    code: int

    def __str__(self) -> str:
        told = "new tags, keep=2" if self.anew else "one tag"
        name = errno.errorcode[self.code]
        return f"{name}: {self.how}, {self.ranks} rank{'s' * (self.ranks > 1)}, {told}"

    def save(self, dir: Path, calls: int) -> list[StorageError | None]:
        """Save a state that tells its calls; return what every rank was refused with."""

        def body() -> StorageError | None:
            step = make_step(self.ranks)
            tag, keep = (None, 2) if self.anew else ("best", None)
            try:
                saving = getattr(fds, self.how)(dir, state_at(step, calls), step, tag, {"calls": calls}, keep=keep)
                if self.how == "save_async":
                    saving.wait()
            except StorageError as error:
                return error
            return None

        return fds.simulate(body, self.ranks)


def make_step(ranks: int) -> fds.Step:
    return fds.compose(Topology(ranks, 1).shard(), fds.sgd(0.1, momentum=0.9))(lambda params, batch: params["w"].sum())


def state_at(step: fds.Step, calls: int) -> fds.State:
    state = step.init(PARAMS)
    return tree.map(lambda x: torch.full_like(x, calls) if x.dtype != torch.int64 or not x.dim() else x, state)


def calls_of(dir: Path, tag: str | None = None) -> int:
    """Return the calls of a save. Raises `StorageError`, and `AssertionError` if its leaves are of several calls."""
    step = fds.compose(fds.sgd(0.1, momentum=0.9))(lambda params, batch: params["w"].sum())
    state, extra = fds.load(dir, step, PARAMS, tag=tag)
    calls = int(state.calls)
    values = {float(v) for name, x in tree.paths(state).items() if name != "key" for v in x.unique()}
    assert (extra, values) == ({"calls": calls}, {calls})
    return calls


def all_scenarios() -> list[Scenario]:
    """Return every scenario."""
    return list(itertools.starmap(Scenario, itertools.product((1, 3), ("save", "save_async"), (False, True), CODES)))


def fail(root: Path, scenario: Scenario, stride: int = 1) -> Row:
    """Let every request fail once, or some, and return what came of it. Raises `Violation`."""
    found, n = Counter[str](), 0
    scenario.save(root / "first", 1)  # starts the processes that write for save_async
    while True:
        with Violation.told(f"{scenario}, request {n}"):
            if not _fail_once(root / "run", scenario, n, found):
                end_helpers()
                return Row(str(scenario), found.total(), dict(found))
        n += stride


def _fail_once(dir: Path, scenario: Scenario, n: int, found: Counter[str]) -> bool:
    """Let request `n` fail; return whether there was such a request. Raises `AssertionError`."""
    shutil.rmtree(dir, ignore_errors=True)
    for calls in (1, 2):
        assert not any(scenario.save(dir, calls))
    before, open_before = tags(dir), open_files()
    with in_hand(fail_at(n, scenario.code)) as made:
        told = scenario.save(dir, 3)
    if n >= len(made):
        assert not any(told)
        return False
    assert (open_files(), running()) == (open_before, []), "files or threads are left"
    texts = {str(error) for error in told}
    assert len(texts) == 1, f"the ranks were told different things at {made[n]}: {texts}"
    after = "replace" in made[:n]  # then it has its name, perhaps not durably, and only older tags are to go
    if told[0] is None:
        assert after or made[n] in HARMLESS or n == made.index("mkdir"), f"nobody was told that {made[n]} failed"
        found["saved"] += 1
    else:
        reason = made[n] == "flock" or os.strerror(scenario.code) in told[0].got  # who cannot lock once counts as lost
        assert reason, f"at {made[n]}: {told[0]}"
        assert scenario.ranks == 1 or told[0].what.startswith("rank "), told[0]
        found["refused"] += 1
    if told[0] is not None and not after:
        assert (tags(dir), calls_of(dir)) == (before, 2), f"{made[n]} changed what was there"
        assert all(calls_of(dir, tag) == (int(tag[4:]) if scenario.anew else 2) for tag in before)
    else:
        assert calls_of(dir) == 3
    writing = scenario.how == "save_async" and scenario.ranks > 1  # a rank may still write when another clears up
    assert (dir / ".saving").exists() <= (after or writing or made[n] in HARMLESS), f"something is left after {made[n]}"
    assert not any(scenario.save(dir, 4))
    want = ["step00000003", "step00000004"] if told[0] is None else None
    assert calls_of(dir) == 4 and (not scenario.anew or want in (None, tags(dir))), tags(dir)
    left = sorted({*os.listdir(dir)} - {".lock", "latest", *tags(dir)})
    assert not left and len(tags(dir)) == 1 + scenario.anew, f"{left} and {tags(dir)} are left after {made[n]}"
    return True


def shorten(root: Path) -> Row:
    """Let every write of a save take less than it is given, once. Raises `Violation`."""
    count, plain, dir = 0, os.pwrite, root / "run"
    for share in SHORT:
        n, last = 0, 0
        while n <= last:
            seen = itertools.count()

            def pwrite(fd, data, place, n=n, share=share, seen=seen):
                if next(seen) != n:
                    return plain(fd, data, place)
                size = share if share == 1 else len(data) + share if share < 0 else int(len(data) * share)
                return plain(fd, data[:size], place)

            with Violation.told(f"a short write, number {n}, {share}"), mock.patch.object(os, "pwrite", pwrite):
                shutil.rmtree(dir, ignore_errors=True)
                assert not any(Scenario(3, "save", False, 0).save(dir, 5))
                assert calls_of(dir) == 5
            last, n, count = next(seen) - 1, n + 1, count + 1
    return Row("short writes: save, 3 ranks", count, {"saved": count})


def open_files() -> list[str]:
    """Return what this process has open, but for pipes to its helpers."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass  # of the listing itself
    return sorted(name for name in found if not name.startswith("pipe:"))


def end_helpers() -> None:
    """End the processes that write for `save_async`, which wait for the next one."""
    while aside._idle:
        aside._idle.pop().close()


def running() -> list[str]:
    """Return the threads of saves."""
    return [t.name for t in threading.enumerate() if t.name == "fds-save" or "_drain" in t.name]
