"""Programs for tests: what `python program.py ...` does, in a process that has imported torch and fds already.

    done = programs.run(path, "--steps", 3, cwd=tmp_path)   # to its end
    running = programs.Program(path, "--steps", 3)          # and meanwhile

Importing torch and fds takes a process 3 s, more than most programs take for the rest; so programs are forked from the
process that ranks are forked from, which has done it. They find what a fresh interpreter would give them, but for the
order in which it walks a set of strings: that is one for all that come from one process.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from pathlib import Path

from tests.ranks import forkserver

ROOT = Path(__file__).parents[1]


class Program:
    """A program that runs, in its ways a `subprocess.Popen`; output and errors go to one place: `log`, where it is."""

    def __init__(
        self,
        path: Path,
        *arguments: object,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        log: Path | None = None,
        leads_session: bool = False,
    ):
        if log is None:
            handle, self._log = tempfile.mkstemp()
            os.close(handle)
            weakref.finalize(self, os.unlink, self._log)
        else:
            self._log = str(log)
        words = [str(path), *map(str, arguments)]
        environment = dict(os.environ if env is None else env)
        started = (self._log, words, str(cwd or Path.cwd()), environment, leads_session)
        self._process = forkserver.Process(target=_main, args=started)
        self._process.start()
        weakref.finalize(self, self._process.kill)
        self.pid: int = self._process.pid
        while leads_session and self.poll() is None and os.getsid(self.pid) != self.pid:
            time.sleep(0.001)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, if it has ended."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises `TimeoutExpired` after `timeout` seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._log, timeout)
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Wait for the end, and return all that it said."""
        self.wait(timeout)
        return Path(self._log).read_text(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run(path: Path, *arguments: object, cwd: Path, timeout: float = 120.0) -> tuple[int, str]:
    """Run a program to its end, and return its exit code and what it said."""
    program = Program(path, *arguments, cwd=cwd)
    said, _ = program.communicate(timeout)
    return program.wait(0), said


def _main(log: str, words: list[str], folder: str, environment: dict[str, str], leads_session: bool) -> None:
    """Do what Python does between its start and its end, after the imports."""
    if leads_session:
        os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (open to the end)
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    if "PYTHONWARNINGS" in environment:
        warnings.simplefilter(environment["PYTHONWARNINGS"])
    os.chdir(folder)
    sys.argv[:] = words
    path = words[0]
    asked = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]
    rest = (p for p in sys.path if p and ROOT not in (Path(p), Path(p).parent))
    sys.path[:] = [str(Path(path).parent), *asked, *rest]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # this very module, which the program would not find
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = path
    try:
        exec(compile(Path(path).read_text(), path, "exec"), vars(main))
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
