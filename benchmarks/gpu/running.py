"""Run a part in processes of its own: watch its cases, end what hangs, go on behind what crashes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from benchmarks.gpu import testing
from benchmarks.gpu.parts import Part
from benchmarks.gpu.records import BEGUN, ERROR, NO_TIME, Record, Records
from benchmarks.gpu.worker import AGAIN, LISTED

ROOT = Path(__file__).parents[2]
LOG = "log"
POLL_S, GRACE_S = 0.2, 5.0


@attrs.frozen
class Call:
    """What holds for a whole call: where results go, on which device, and how it is told that something was done."""

    out: Path
    device: str = "cuda"
    jobs: int = 12  # pytest's workers
    select: tuple[str, ...] = ()  # tests, by paths; all that make sense on a GPU if none
    wrote: Callable[[Records], None] = lambda records: None

    def command(self, part: Part, until: float) -> tuple[list[str], dict[str, str]]:
        """Return the command of a part, and its environment."""
        if not part.module:
            return testing.command(self, part.name, until)
        words = [sys.executable, "-m", "benchmarks.gpu.worker", str(self.out), part.name, part.module, self.device]
        return words, environment(self.device)


def environment(device: str) -> dict[str, str]:
    """Return the environment of processes that run cases: kernels are interpreted on the CPU, and there alone."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "PYTHONUNBUFFERED": "1",
        "TRITON_INTERPRET": "0" if device == "cuda" else "1",
        "FDS_TEST_DEVICE": device,
    }


def run(call: Call, part: Part, records: Records, until: float) -> None:
    """Do what is left of a part until a moment of `time.monotonic`; record what there was no time for."""
    barren = 0  # processes in a row that ended without doing a case
    while time.monotonic() < until and barren < 2:
        tried = len(records.tried(part.name))
        status = _process(call, part, records, until)
        records.refresh()
        if status == 0:
            return
        barren = 0 if len(records.tried(part.name)) > tried else barren + 1
    _note_rest(part, records)
    call.wrote(records)


def _process(call: Call, part: Part, records: Records, until: float) -> int:
    """Run one process of a part to its end, or end it; return its status, 0 if nothing is left to do."""
    words, environ = call.command(part, until)
    with (call.out / LOG).open("ab") as log:
        begin = log.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            words, cwd=ROOT, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0
        )
        try:
            overdue = _watch(call, part, records, process, until)
        finally:
            end(process)
    status, running = process.returncode, running_case(records.refresh(), part.name)
    if running is None and not overdue and status not in ((0, AGAIN) if part.module else testing.ENDED):
        running = Record(part.name, LISTED, BEGUN, at=time.time())  # pytest as a whole, or a module's end
    if running is None:
        return 0 if not part.module and status in testing.ENDED else status
    seconds, tail = round(time.time() - running.at, 3), tail_of(call.out / LOG, begin)
    if overdue == NO_TIME:
        records.add(Record(part.name, running.case, NO_TIME, seconds, error="cut off: no time left"))
    elif overdue:
        records.add(Record(part.name, running.case, ERROR, seconds, error=f"no end after {overdue}; killed\n{tail}"))
    else:
        records.add(
            Record(part.name, running.case, ERROR, seconds, error=f"the process ended, {name_of(status)}\n{tail}")
        )
    return status or AGAIN


def _watch(call: Call, part: Part, records: Records, process: subprocess.Popen, until: float) -> str:
    """Wait for a process; return why it has to be ended, "" where it has ended."""
    seen = 0
    while process.poll() is None:
        found = records.refresh()
        if len(found) != seen:
            seen = len(found)
            call.wrote(records)
        if time.monotonic() > until + (0 if part.module else GRACE_S):
            return NO_TIME
        running = running_case(found, part.name)
        if running is not None and time.time() - running.at > running.seconds:
            return f"{running.seconds:g} s"
        time.sleep(POLL_S)
    return ""


def running_case(records: list[Record], part: str) -> Record | None:
    """Return the record of the case of a part that has begun and has not ended; its seconds are its limit."""
    last = next((r for r in reversed(records) if r.part == part), None)
    return last if last is not None and last.status == BEGUN else None


def _note_rest(part: Part, records: Records) -> None:
    """Record what there was no time for, as far as the part has said what its cases are."""
    listed = [r.figures.get("left", []) for r in records.records if r.part == part.name and r.call == records.call]
    over = records.tried(part.name) | records.done(part.name)
    for name in dict.fromkeys(name for names in listed for name in names):
        if name not in over:
            records.add(Record(part.name, name, NO_TIME))
    if not any(listed) and part.module and LISTED not in records.tried(part.name):
        records.add(Record(part.name, LISTED, NO_TIME))


def end(process: subprocess.Popen) -> None:
    """End a process and all that it has started."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            pass
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen, number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def name_of(status: int) -> str:
    """Return a status of `Popen` in words."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def tail_of(log: Path, begin: int) -> str:
    """Return the last lines that a process wrote."""
    with log.open("rb") as file:
        file.seek(max(begin, log.stat().st_size - 3000))
        return file.read().decode(errors="replace")
