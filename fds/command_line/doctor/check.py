"""What a check is made of: its settings and findings, and fresh processes for what may crash or hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import attrs

Level = Literal["ok", "note", "problem"]  # a problem breaks training, or makes it something else than was meant


@attrs.frozen
class Finding:
    """One line of the report.

    Attributes:
        what: the thing: "torch".
        found: what it is: "2.13.0".
        level: whether to do something about it.
        advice: what to do, or why it is as it is; may be empty.
        values: numbers and texts for programs, with units in their names.
    """

    what: str
    found: str
    level: Level = "ok"
    advice: str = ""
    values: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Settings:
    """How to check: the folder whose disk is measured, and whether to leave out what takes longer than a second."""

    dir: Path
    quick: bool


Check = Callable[[Settings], Iterator[Finding]]


def examine(check: Check, settings: Settings) -> Iterator[Finding]:
    """Yield what a check finds. A check that fails is itself a finding: the others go on."""
    try:
        yield from check(settings)
    except Exception as error:
        yield Finding(
            "this check",
            f"failed: {type(error).__name__}: {error}",
            "note",
            "it says nothing about your machine; please report it with this line",
        )


@attrs.frozen
class Ended:
    """How a process ended: its exit code, None where it was killed after the time limit, and what it printed."""

    code: int | None
    out: str
    err: str

    @property
    def reason(self) -> str:
        """Why it failed, in a line: the last one that it printed."""
        last = next((line.strip() for line in reversed(self.err.splitlines()) if line.strip()), "")
        how = f"exit code {self.code}"
        if self.code is None:
            how = "no answer within the time limit"
        elif self.code < 0:
            how = f"ended by {signal.Signals(-self.code).name}"
        return f"{how}: {last}" if last else how


def run_together(
    module: str, environs: Sequence[Mapping[str, str]], *, arguments: str = "", limit: float
) -> list[Ended]:
    """Run a module once per environment, all at the same time, and kill what is left after `limit` seconds.

    A process gets this one's environment without what a launcher set, and the given variables. It finds modules where
    this one does: a `queue.py` in the folder is not Python's.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    command = [sys.executable, "-P", "-c", _PROGRAM.format(path=sys.path, module=module), *arguments.split()]
    with contextlib.ExitStack() as files:
        started = []
        for environ in environs:  # into files, not pipes, which fill up
            out, err = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            started.append((subprocess.Popen(command, env={**inherited, **environ}, stdout=out, stderr=err), out, err))
        codes = _wait([process for process, _, _ in started], limit)
        return [Ended(code, _text(out), _text(err)) for code, (_, out, err) in zip(codes, started, strict=True)]


def _wait(processes: Sequence[subprocess.Popen], limit: float) -> list[int | None]:
    """Return the exit codes of processes, None for those that are killed since the time is over."""
    end = time.monotonic() + limit
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        return [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


_PROGRAM = (
    "import runpy, sys; sys.path[:] = {path!r}; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)
_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    *("OMPI_", "PMI", "MPI_", "SLURM_"),
)
