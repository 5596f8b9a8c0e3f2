"""The tests as a part: which files make sense on a GPU, and the command that runs them there."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.running import Call

ENDED = (0, 1, 5)  # statuses of pytest: all passed, some failed, none was left
LIMIT_S = 180.0  # of one test, with what it compiles
MARKED = {"cuda": "not peers and not inductor", "cpu": "not peers and not inductor and not gpu"}
OUT, NOW, UNTIL, LIMIT = "FDS_GPU_OUT", "FDS_GPU_NOW", "FDS_GPU_UNTIL", "FDS_GPU_TEST_LIMIT"


def command(call: Call, until: float) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs what is left of the tests, and its environment."""
    from benchmarks.gpu.running import environment
    from tests.on_a_gpu import NOT_ON_A_GPU, ON_A_GPU

    words = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "benchmarks.gpu.pytest_plugin"]
    words += ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    words += [
        "-o",
        "filterwarnings=default",
        "--disable-warnings",
    ]  # of torch 2.11 to 2.13, and of plugins that are there
    words += ["-m", MARKED[call.device], "-n", str(call.jobs), "--max-worker-restart", "100000"]
    now = time.time()
    environ = {
        OUT: str(call.out),
        NOW: repr(now),
        UNTIL: repr(now + until - time.monotonic()),
        LIMIT: os.environ.get(LIMIT, str(LIMIT_S)),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # products of equal bits, whichever stream
    }
    words += [f"--ignore={path}" for path in NOT_ON_A_GPU if path.endswith(".py")]
    return [*words, *(call.select or ON_A_GPU)], {**environment(call.device), **environ}
