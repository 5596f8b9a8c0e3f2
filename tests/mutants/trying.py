"""Mutants are tried in copies of the tree, each by its tests; the checkout itself is never written to."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

import attrs

from tests.mutants.mutant import Mutant

KILLED, SURVIVED, NOT_APPLIED, UNTESTED = "killed", "SURVIVED", "does not apply", "NOT TESTED"
NOT_COPIED = (".git", ".venv*", ".pytest_cache", ".ruff_cache", "*.egg-info", "dist", "build", "site")
LIMIT_S = 300.0  # for the tests of one mutant; what then still runs hangs
FAILED, NO_TESTS = 1, 5  # exit codes of pytest
PYTEST = ("-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider")


@attrs.frozen
class Run:
    """What pytest said of some tests."""

    code: int | None  # None: it was ended after `seconds`
    seconds: float
    output: str

    @property
    def failed(self) -> list[str]:
        """The tests that failed."""
        return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", self.output, re.MULTILINE)


@attrs.frozen
class Outcome:
    """What became of a mutant, and by which test."""

    mutant: Mutant
    verdict: str
    by: str
    seconds: float = 0.0
    test: str = ""  # what pytest is told to run to see it


def try_all(mutants: list[Mutant], root: Path, *, jobs: int, tell: Callable[[Outcome], None]) -> list[Outcome]:
    """Try mutants in `jobs` copies of the tree at `root`; `tell` is called with each outcome as it is known.

    Then all tests that failed run once more, in a copy without any mutant: one that fails there, too, shows nothing.
    """
    left: Queue[Mutant] = Queue()
    for one in mutants:
        left.put(one)
    outcomes: dict[str, Outcome] = {}
    broken: list[BaseException] = []

    def work() -> None:
        try:
            with copied(root) as tree:
                while not broken:
                    outcome = _tried(left.get_nowait(), tree)
                    outcomes[outcome.mutant.name] = outcome
                    tell(outcome)
        except Empty:
            pass
        except BaseException as error:
            broken.append(error)

    threads = [Thread(target=work, daemon=True) for _ in range(min(jobs, len(mutants)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if broken:
        raise broken[0]
    tests = sorted({one.test for one in outcomes.values() if one.test})
    failing = _failing_without(tests, root)
    for name, one in outcomes.items():
        if one.test in failing:
            outcomes[name] = attrs.evolve(one, verdict=UNTESTED, by=f"fails without the mutant, too: {one.by}")
    return [outcomes[one.name] for one in mutants]


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
    """Make a copy of a tree without its environments."""
    with tempfile.TemporaryDirectory(prefix="fds-mutants-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder) / "fds"
        shutil.copytree(root, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
        yield tree


@contextlib.contextmanager
def mutated(mutant: Mutant, tree: Path) -> Iterator[bool]:
    """Have a tree with a mutant in it; yield whether its text was found."""
    path = tree / mutant.file
    before = path.read_text() if path.exists() else ""
    text = mutant.applied(before)
    if text is None:
        yield False
        return
    path.write_text(text)
    try:
        yield True
    finally:
        path.write_text(before)


def run(tests: list[str], tree: Path, limit_s: float = LIMIT_S) -> Run:
    """Run tests in a tree; end them, with all processes that they started, after a limit."""
    began = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [sys.executable, *PYTEST, *tests],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree), "FDS_HYPOTHESIS_PROFILE": "unshrunk", "FDS_SWEEPS": "whole"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        log.seek(0)
        return Run(code, time.monotonic() - began, log.read())


def _tried(mutant: Mutant, tree: Path) -> Outcome:
    """Try a mutant by its tests, up to the first that fails."""
    with mutated(mutant, tree) as found:
        if not found:
            return Outcome(mutant, NOT_APPLIED, f"its text is not in {mutant.file} exactly once")
        ran = run(["-x", *shlex.split(mutant.tests)], tree)
    if ran.code == FAILED and ran.failed:
        return Outcome(mutant, KILLED, ran.failed[0], ran.seconds, ran.failed[0])
    if ran.code is None:
        return Outcome(mutant, KILLED, f"a hang, ended after {ran.seconds:.0f} s", ran.seconds, mutant.tests)
    if ran.code < 0:
        return Outcome(mutant, KILLED, f"pytest itself, by {signal.Signals(-ran.code).name}", ran.seconds, mutant.tests)
    if ran.code == 0:
        return Outcome(mutant, SURVIVED, "", ran.seconds)
    why = "its selection has no tests" if ran.code == NO_TESTS else f"pytest ends with {ran.code}"
    return Outcome(mutant, UNTESTED, why, ran.seconds)


def _failing_without(tests: list[str], root: Path) -> set[str]:
    """Return those of the tests, or selections of tests, that do not pass in a tree without a mutant."""
    failing: set[str] = set()
    named = [test for test in tests if "::" in test]
    if not tests:
        return failing
    with copied(root) as tree:
        ran = run(named, tree, LIMIT_S + 30.0 * len(named)) if named else None
        if ran is not None and ran.code in (0, FAILED):
            failing.update(ran.failed)
        elif ran is not None:  # one of them was not found, or ended pytest
            failing.update(one for one in named if run([one], tree).code != 0)
        failing.update(one for one in tests if one not in named and run(shlex.split(one), tree).code != 0)
    return failing
