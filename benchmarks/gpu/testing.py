"""The tests as two parts, those of kernels and all others: which make sense on a GPU, and what runs them there."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.running import Call

KERNELS, OTHERS = "kernel-tests", "tests"
PARTS = (KERNELS, OTHERS)
ENDED = (0, 1, 5)  # statuses of pytest: all passed, some failed, none was left
LIMIT_S = 180.0  # of one test, with what it compiles
MARKED = {"cuda": "not peers and not inductor", "cpu": "not peers and not inductor and not gpu"}
PART, OUT, NOW, UNTIL = "FDS_GPU_PART", "FDS_GPU_OUT", "FDS_GPU_NOW", "FDS_GPU_UNTIL"
LIMIT = "FDS_GPU_TEST_LIMIT"


def paths(part: str, select: tuple[str, ...]) -> list[str]:
    """Return which paths a part runs, of those that were selected, or of all that make sense on a GPU."""
    from tests.on_a_gpu import ON_A_GPU

    return [path for path in select or ON_A_GPU if path.startswith("tests/kernels") == (part == KERNELS)]


def command(call: Call, part: str, until: float) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs what is left of the tests of a part, and its environment."""
    from benchmarks.gpu.running import environment
    from tests.on_a_gpu import NOT_ON_A_GPU

    words = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "benchmarks.gpu.pytest_plugin"]
    words += ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    # of torch 2.11 to 2.13, and of plugins that are there
    words += ["-o", "filterwarnings=default", "--disable-warnings"]
    words += ["-m", MARKED[call.device], "-n", str(call.jobs), "--max-worker-restart", "100000"]
    # in their order, two at a time: by worksteal each worker begins with its share of all, and kernels would end last
    words += ["--dist=load", "--maxschedchunk=2"]
    now = time.time()
    environ = {
        PART: part,
        OUT: str(call.out),
        NOW: repr(now),
        UNTIL: repr(now + until - time.monotonic()),
        LIMIT: os.environ.get(LIMIT, str(LIMIT_S)),
        "FDS_HYPOTHESIS_PROFILE": "unshrunk",  # a failing law that shrinks meets the limit, and its words are lost
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # products of equal bits, whichever stream
    }
    words += [f"--ignore={path}" for path in NOT_ON_A_GPU if path.endswith(".py")]
    return [*words, *paths(part, call.select)], {**environment(call.device), **environ}
