"""Where a run runs: versions, machine, ranks, program, commit."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from fds import __version__

_SECONDS = 5.0  # that git may take


def environment(device: torch.device, axes: dict[str, int], num_ranks: int) -> dict[str, str]:
    """Return name -> text of what numbers and speeds of a run may depend on; what cannot be found is left out."""
    found = {
        "fds": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "machine": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": str(_cores()),
        "memory": _memory(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "ranks": str(num_ranks),
        "axes": ", ".join(f"{name}={size}" for name, size in axes.items()),
        "program": shlex.join(sys.argv),
        "commit": _commit(Path("".join(sys.argv[:1]) or "-c").resolve().parent),
    }
    return {name: text for name, text in found.items() if text}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (ValueError, OSError):
        return ""


def _commit(folder: Path) -> str:
    """Return the commit that a folder is at, and whether files of it were changed; empty where there is none."""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head and head + ", with changes" * bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *words: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True).stdout.strip()
