"""The record of kernels that passed, `fds/kernels/passed.json`, from the results of a run on a GPU.

`fds.kernels.choice` runs a kernel where nobody asked only if that record says that it passed on such a GPU. An entry
is made of `results.json`, as `benchmarks.gpu.merging` writes it:

- `calls`, one for each call: "device" "cuda"; "GPU" "NVIDIA H200, sm_90, ..."; the versions "torch" and "triton"; "at",
  seconds since 1970; and "kernels", the `fds.kernels.evidence.fingerprint` of each kernel, of the code that ran;
- `parts`, the last record of each case. Of "kernel-tests": "case" "tests/kernels/test_swiglu.py::...", "status",
  "call". Of "kernels" also, in "figures", "seconds": contender -> times of its rounds; "case" "swiglu, forward, ...".

A kernel passed if all of its tests passed, and none of its timed cases failed, with the code that is here now. Its
tests are those of its files whose parameters name neither another kernel nor "reference", which runs torch's operators.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.gpu import testing
from benchmarks.gpu.records import NO_TIME, PASSED
from fds.kernels import evidence
from fds.kernels.evidence import HOMES, Passed, fingerprint, kernel_of

# Files of tests/kernels, in each of which a kernel has to pass all; together they take every dtype.
TESTS = {
    "adamw": "elementwise flat multi_tensor",
    "bias_dropout_add": "dropout_add philox",
    "bias_gelu": "gelu",
    "bias_gelu_linear": "gelu",
    "cross_entropy": "cross_entropy",
    "fake_quantize": "fake_quantize",
    "flash_attention": "flash attention philox",
    "lamb": "lamb flat",
    "layer_norm": "layer_normalization normalization normalization_use",
    "linear_cross_entropy": "linear_cross_entropy cross_entropy",
    "lion": "elementwise flat multi_tensor",
    "masked_softmax": "softmax philox",
    "pack_signs": "messages",
    "quantize": "messages",
    "rms_norm": "rms_normalization normalization normalization_use",
    "rotary": "rotary",
    "sgd": "elementwise flat multi_tensor",
    "sparse_attention": "sparse block_selection philox",
    "sum_messages": "messages",
    "swiglu": "swiglu",
}
DTYPES = ("bfloat16", "float16", "float32")
# What runs in place of a kernel; without masks and dropout torch's attention runs anyway, so that is not compared.
TORCHS = re.compile(r"torch (eager|fused|SDPA)")
NOT_RECORDED = "not recorded: "
NOT_COMPARED = ("flash_attention, causal",)


class NotPassed(Exception):
    """Why there is no entry for a kernel."""


def fingerprints() -> dict[str, str]:
    """Return the fingerprint of every kernel, for the facts of a call."""
    return {kernel: fingerprint(kernel) for kernel in HOMES}


def record(results: Path, into: Path) -> dict[str, str]:
    """Write the kernels that passed into a record, and return for every kernel what came of it, in words.

    Entries of other architectures stay; those of kernels that did not pass now go.
    """
    found = json.loads(results.read_text())
    entries = {(entry.kernel, entry.architecture): entry for entry in evidence.read(into)}
    told = {}
    for kernel in HOMES:
        try:
            entry = entry_of(kernel, found)
        except NotPassed as why:
            told[kernel] = f"{NOT_RECORDED}{why}"
            for architecture in architectures(found):
                entries.pop((kernel, architecture), None)
        else:
            entries[kernel, entry.architecture] = entry
            speeds = ", ".join(f"{dtype} {speed:.2f} of torch's speed" for dtype, speed in entry.speed.items())
            told[kernel] = f"passed {entry.num_cases} cases on {entry.gpu} ({speeds or 'not timed'})"
    evidence.write(into, list(entries.values()))
    return told


def entry_of(kernel: str, found: Mapping[str, Any]) -> Passed:
    """Return the entry of a kernel that passed. Raises `NotPassed`."""
    tests, timed = list(tests_of(kernel, found)), list(timed_of(kernel, found))
    calls = [found["calls"][one["call"] - 1] for one in (*tests, *timed)]
    gpus = {gpu_of(call) for call in calls}
    if len(gpus) != 1:
        raise NotPassed(f"cases ran on {', '.join(sorted(name for name, _ in gpus))}")
    if any(call.get("kernels", {}).get(kernel) != fingerprint(kernel) for call in calls):
        raise NotPassed("the kernel changed since cases of it ran: run them again, into another folder")
    ((gpu, architecture),), last = gpus, max(calls, key=lambda call: call["at"])
    day = datetime.datetime.fromtimestamp(last["at"], datetime.UTC).date().isoformat()
    source, speed = fingerprint(kernel), speed_of(timed)
    return Passed(kernel, architecture, gpu, day, last["torch"], last["triton"], DTYPES, len(tests), source, speed)


def tests_of(kernel: str, found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the records of a kernel's tests. Raises `NotPassed` with those that did not pass, or a file without any."""
    ran = [one for part in testing.PARTS for one in found["parts"].get(part, [])]
    for name in TESTS[kernel].split():
        file = f"tests/kernels/test_{name}.py"
        some = [one for one in ran if one["case"].partition("::")[0] == file and tests(kernel, one["case"])]
        wrong = [f"{one['case']}: {one['status']}" for one in some if one["status"] != PASSED]
        if wrong:
            more = [f"and {len(wrong) - 3} more"] if len(wrong) > 3 else []
            raise NotPassed(f"{len(wrong)} of {len(some)} tests did not pass: {', '.join([*wrong[:3], *more])}")
        if not some:
            raise NotPassed(f"no test of {file} ran")
        yield from some


def tests(kernel: str, case: str) -> bool:
    """Say whether a test asks a kernel, by its parameters; one whose parameters name no kernel asks all of its file."""
    words = case.partition("[")[2].rstrip("]").split("-")
    named = {name for name in HOMES for word in words if word == name or word.startswith(f"{name}_")}
    return "reference" not in words and (not named or kernel in named)


def timed_of(kernel: str, found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the records of a kernel's timed cases, as far as there was time. Raises `NotPassed` where one failed."""
    for one in found["parts"].get("kernels", []):
        if kernel_of(one["case"].partition(",")[0]) == kernel and one["status"] != NO_TIME:
            if one["status"] != PASSED:
                raise NotPassed(f"{one['case']}: {one['status']}")
            yield one


def speed_of(timed: list[dict[str, Any]]) -> dict[str, float]:
    """Return by dtype the time of torch's fastest operators over that of the kernel, the geometric mean over cases."""
    ratios: dict[str, list[float]] = {}
    for one in timed:
        times = {name: median(some) for name, some in one["figures"].get("seconds", {}).items()}
        torchs = [time for name, time in times.items() if TORCHS.match(name)]
        dtypes = sorted((one["case"].find(dtype), dtype) for dtype in DTYPES if dtype in one["case"])
        if torchs and dtypes and not one["case"].startswith(NOT_COMPARED):
            (_, dtype), *_ = dtypes  # the first named: of an update its parameters'
            ratios.setdefault(dtype, []).append(min(torchs) / times["fds"])
    return {dtype: math.floor(100 * geometric_mean(some)) / 100 for dtype, some in sorted(ratios.items())}


def architectures(found: Mapping[str, Any]) -> set[str]:
    """Return the architectures of the GPUs of all calls."""
    return {gpu_of(call)[1] for call in found["calls"] if call.get("device") == "cuda"}


def gpu_of(call: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name of a call's GPU, and its architecture. Raises `NotPassed` for a call on something else."""
    match = re.match(r"(.+?), (sm_\d+)\b", call.get("GPU", ""))
    if call.get("device") != "cuda" or match is None:
        raise NotPassed("its cases did not run on a GPU")
    return match[1], match[2]
