"""Cases for the runner itself: one passes, the others fail, hang, crash, and leave CUDA unusable."""

import os
import signal
import sys
import time
from collections.abc import Iterator

from benchmarks.gpu.records import Case, Failed
from benchmarks.kernel_works import Setting


def cases(setting: Setting) -> Iterator[Case]:
    assert setting.tiny and setting.device.type == "cpu"
    yield Case("passes", lambda: {"ms": 0.5})
    yield Case("is wrong", wrong)
    yield Case("raises", lambda: {}["no such key"])
    yield Case("hangs", lambda: time.sleep(600), limit_s=0.5)
    yield Case("crashes", lambda: os.kill(os.getpid(), signal.SIGSEGV))
    yield Case("breaks CUDA", break_cuda)
    yield Case("passes, after all of that", lambda: None)


def wrong() -> None:
    raise Failed("0.1 apart", {"apart": 0.1})


def break_cuda() -> None:
    """Do as a case does after which every call of CUDA fails in this process."""
    sys.modules["__main__"].is_broken = lambda: True
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
