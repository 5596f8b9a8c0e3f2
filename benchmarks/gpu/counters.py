"""compute-sanitizer on tiny shapes of every kernel in bfloat16: a case for each of its tools and each kernel.

On the CPU, where there is no sanitizer, the same programs run by themselves: it is seen that they do.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from benchmarks.gpu.records import Case, Failed
from benchmarks.gpu.tiny import RUNS
from benchmarks.kernel_works import Setting

# Kernels whose threads share memory (benchmarks/results/*-kernels-sm90.md), where they may race.
SHARED = ("flash_attention", "layer_norm", "rms_norm", "masked_softmax", "cross_entropy", "linear_cross_entropy")
SHARED += ("lamb", "bias_gelu", "bias_dropout_add", "rotary", "quantize", "pack_signs", "fake_quantize")
SHARED += ("sparse_attention",)
_REPORT = ["--error-exitcode", "9", "--print-limit", "5"]
MEMCHECK = ["--tool", "memcheck", *_REPORT]
RACECHECK = ["--tool", "racecheck", *_REPORT, "--racecheck-report", "all"]
INITCHECK = ["--tool", "initcheck", *_REPORT]
# By what they find: all of one before the next, since five minutes may not be enough for all.
TOOLS = [(MEMCHECK, tuple(RUNS)), (RACECHECK, SHARED), (INITCHECK, tuple(RUNS))]
AT_ONCE = 6  # programs under a sanitizer: it is the host that they wait for
LIMIT_S, OF_ONE_S = 150.0, 120.0
PLACES = ("/usr/local/cuda/bin", "/opt/cuda/bin")


def sanitizer() -> str | None:
    """Return where compute-sanitizer is, None where it is nowhere."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(PLACES))


def cases(setting: Setting) -> Iterator[Case]:
    """Yield a case for each tool and kernel, all kernels of one tool first; one that fails where none is installed."""
    if setting.device.type != "cuda":
        ahead = Ahead(2, [(kernel, [], setting.device.type) for kernel in RUNS])
        yield from (
            Case(f"no tool, {kernel}", lambda kernel=kernel: ahead.result(kernel, []), LIMIT_S) for kernel in RUNS
        )
        return
    tool = sanitizer()
    if tool is None:
        yield Case("compute-sanitizer", not_installed)
        return
    wanted = [(kernel, [tool, *options]) for options, some in TOOLS for kernel in some]
    ahead = Ahead(AT_ONCE, [(kernel, words, "cuda") for kernel, words in wanted])
    for kernel, words in wanted:
        yield Case(f"{words[2]}, {kernel}", lambda kernel=kernel, words=words: ahead.result(kernel, words), LIMIT_S)


def not_installed() -> dict[str, Any]:
    """Fail."""
    raise Failed(f"compute-sanitizer is neither on the PATH nor in {', '.join(PLACES)}")


class Ahead:
    """Programs that run some at a time: who asks for one starts the next ones too."""

    def __init__(self, at_once: int, wanted: list[tuple[str, list[str], str]]):
        self.at_once, self.wanted = at_once, wanted
        self.pool, self.running = ThreadPoolExecutor(at_once), dict[int, Future]()

    def result(self, kernel: str, words: list[str]) -> dict[str, Any]:
        """Return the figures of a program. Raises `Failed` with what was found."""
        at = next(i for i, (name, some, _) in enumerate(self.wanted) if (name, some) == (kernel, words))
        for i in range(at, min(at + self.at_once, len(self.wanted))):
            if i not in self.running:
                self.running[i] = self.pool.submit(program, *self.wanted[i])
        return self.running[at].result()


def program(kernel: str, words: list[str], device: str) -> dict[str, Any]:
    """Run a kernel's program under a tool, and return figures. Raises `Failed` with what was found."""
    # without torch's cache every tensor is an allocation, behind whose end nothing may be read
    environ = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONUNBUFFERED": "1"}
    command = [*words, sys.executable, "-m", "benchmarks.gpu.tiny", kernel, device, "bfloat16"]
    try:
        ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=OF_ONE_S)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"no end after {OF_ONE_S:g} s\n{_text(error.stdout)[-2000:]}") from None
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", ran.stdout)
    found = {"summary": summary[-1] if summary else "", "status": ran.returncode}
    if ran.returncode or "all ran" not in ran.stdout or (words and not summary):
        raise Failed(
            f"status {ran.returncode}\n{ran.stdout[:1500]}\n...\n{ran.stdout[-1000:]}\n{ran.stderr[-1000:]}", found
        )
    return found


def _text(output: Any) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
