"""One process of a part: `python -m benchmarks.gpu.worker OUT PART MODULE DEVICE`, started and watched by `running`.

It does the cases that did not pass before and were not tried in this call, those never tried first. After a CUDA error
nothing more can be done in a process, so it ends, with the status `AGAIN`, and is started anew.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from benchmarks.gpu.records import BEGUN, ERROR, FAILED, NO_TIME, PASSED, Case, Failed, Record, Records
from benchmarks.kernel_works import Setting

AGAIN = 75
LISTED = "(cases)"  # the case under which it is recorded that a part could not say what its cases are


def main(out: str, part: str, module: str, device: str) -> int:
    """Do what is left of a part, and return the exit status."""
    end_with_parent()
    records = Records(Path(out))
    records.add(Record(part, LISTED, BEGUN, 120.0))
    setting = setting_of(device, records.done(part) | records.tried(part))
    todo = left(records, part, list(importlib.import_module(module).cases(setting)))
    records.add(Record(part, LISTED, PASSED, figures={"left": [case.name for case in todo]}))
    for case in todo:
        records.add(Record(part, case.name, BEGUN, case.limit_s))
        records.add(attempt(part, case))
        if is_broken():
            print(f"{part}: {case.name} broke CUDA in this process, which is started anew", flush=True)
            return AGAIN
    return 0


def setting_of(device: str, done: set[str]) -> Setting:
    """Return where and how large: on the CPU tiny, and nothing compiled, since it is to be seen that all runs."""
    small = {} if device == "cuda" else {"tiny": True, "compiled": lambda f: f}
    return Setting(torch.device(device), **small, done=frozenset(done))


def left(records: Records, part: str, cases: list[Case]) -> list[Case]:
    """Return the cases to do, those that were never tried first."""
    latest = records.latest(part)
    over = records.done(part) | records.tried(part)
    new = lambda case: case.again or case.name not in latest or latest[case.name].status == NO_TIME
    return sorted((case for case in cases if case.again or case.name not in over), key=lambda case: not new(case))


def attempt(part: str, case: Case) -> Record:
    """Do a case, and return its record."""
    begun, status, figures, error = time.monotonic(), PASSED, {}, ""
    try:
        figures = dict(case.run() or {})
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what it launched fails here, and not in the next case
    except Failed as failure:
        status, figures, error = FAILED, failure.figures, str(failure)
    except Exception:  # whatever a case raises is its own
        status, error = ERROR, traceback.format_exc()
    print(f"{part}: {case.name}: {status}\n{error}", flush=True)
    return Record(part, case.name, status, round(time.monotonic() - begun, 3), figures, error)


def is_broken() -> bool:
    """Say whether CUDA is unusable in this process, as it is for good after an illegal access."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


def end_with_parent() -> None:
    """Be killed when the parent ends, however it does (Linux, PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


if __name__ == "__main__":
    status = main(*sys.argv[1:5])
    sys.stdout.flush()
    os._exit(status)  # what a broken driver does at exit takes no part in it
