"""GPUs: name, memory, compute capability, driver; having none is fine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from fds.command_line.doctor.finding import Finding, Settings

DRIVER = Path("/proc/driver/nvidia/version")
GIB = 2**30


def devices(settings: Settings) -> Iterator[Finding]:
    """Find the GPUs that torch sees, and say so where there is one that it does not see."""
    driver = _driver()
    if not torch.cuda.is_available():
        yield _none(driver)
        return
    if driver:
        yield Finding("driver", f"NVIDIA {driver}")
    for i in range(torch.cuda.device_count()):
        yield _gpu(i)


def _driver() -> str:
    """Return the version of NVIDIA's driver; empty where it is not loaded, as inside some containers."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", DRIVER.read_text())
    except OSError:
        return ""
    return found[0] if found else "of unknown version"


def _none(driver: str) -> Finding:
    if not driver:
        return Finding("GPU", "none", advice="fds trains on the CPU")
    if torch.version.cuda is None:
        advice = "this build of torch is for the CPU; take one for your GPU: https://pytorch.org/get-started"
        return Finding("GPU", f"NVIDIA's driver {driver} is loaded, and torch cannot use it", "problem", advice)
    advice = f"torch needs a driver for CUDA {torch.version.cuda}; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
    return Finding("GPU", f"NVIDIA's driver {driver} is loaded, and torch sees no GPU", "problem", advice)


def _gpu(i: int) -> Finding:
    about = torch.cuda.get_device_properties(i)
    free, total = torch.cuda.mem_get_info(i)
    capability = f"{about.major}.{about.minor}"
    found = f"{about.name}, {total / GIB:.0f} GiB ({free / GIB:.0f} free), compute capability {capability}"
    values = {"name": about.name, "total_bytes": total, "free_bytes": free, "capability": capability}
    if torch.version.hip is None and (about.major, about.minor) < (7, 0):
        advice = "Triton compiles for 7.0 and later: leave fds.triton_kernels() out"
        return Finding(f"GPU {i}", found, "note", advice, values)
    if torch.version.hip is None and about.major < 8:
        advice = "no bfloat16 in hardware: fds.precision(torch.float16) with fds.loss_scale()"
        return Finding(f"GPU {i}", found, "note", advice, values)
    if free < total / 2:
        return Finding(f"GPU {i}", found, "note", "other processes hold its memory: nvidia-smi names them", values)
    return Finding(f"GPU {i}", found, values=values)
