"""The host: cores and threads, memory and its limits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from fds.command_line.doctor.finding import Finding, Settings

GIB = 2**30
CGROUP, MEMORY, SHARED = Path("/sys/fs/cgroup"), Path("/proc/meminfo"), Path("/dev/shm")
FILES = 1024  # that a process should be able to open


def host(settings: Settings) -> Iterator[Finding]:
    """Find cores, threads, memory, shared memory, and the limit of open files."""
    yield _threads()
    if MEMORY.exists():
        yield _memory()
    if SHARED.exists():
        yield _shared()
    yield from _open_files()


def _threads() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    allowed = cores if quota is None else min(cores, quota)
    threads = torch.get_num_threads()
    found = f"{cores} cores{f', of whose time {quota:g} are allowed' if quota else ''}; torch takes {threads} threads"
    values = {"cores": cores, "quota": quota, "threads": threads}
    if threads > max(allowed, 1):
        advice = f"more threads than cores wait for each other: export OMP_NUM_THREADS={max(1, int(allowed))}"
        return Finding("cores", found, "note", advice, values)
    return Finding("cores", found, values=values)


def _quota() -> float | None:
    """Return how many cores' time the container may use; None without a limit."""
    try:
        most, period = (CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if most == "max" else int(most) / int(period)


def _memory() -> Finding:
    lines = (line.split(":") for line in MEMORY.read_text().splitlines())
    sizes = {name: int(rest.split()[0]) * 1024 for name, rest in lines if name in ("MemTotal", "MemAvailable")}
    total, available = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemTotal"])
    limit = _limit()
    found = f"{total / GIB:.1f} GiB, {available / GIB:.1f} available"
    values = {"total_bytes": total, "available_bytes": available, "limit_bytes": limit}
    if limit is not None and limit < total:
        advice = "the container is killed beyond it"
        return Finding("memory", f"{found}, limited to {limit / GIB:.1f}", "note", advice, values)
    return Finding("memory", found, values=values)


def _limit() -> int | None:
    """Return the bytes that the container may use; None without a limit."""
    try:
        text = (CGROUP / "memory.max").read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _shared() -> Finding:
    size = os.statvfs(SHARED)
    total, free = size.f_frsize * size.f_blocks, size.f_frsize * size.f_bavail
    low = free < GIB
    advice = "loaders with workers, and NCCL between GPUs, pass data through it: docker run --shm-size=8g"
    found = f"{total / GIB:.1f} GiB, {free / GIB:.1f} free"
    return Finding("shared memory", found, "note" if low else "ok", advice * low, {"free_bytes": free})


def _open_files() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = soft != resource.RLIM_INFINITY and soft < FILES
    found = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    yield Finding("open files", found, "note" if low else "ok", "ulimit -n 65536" * low, {"limit": soft})
