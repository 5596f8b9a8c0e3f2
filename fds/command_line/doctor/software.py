"""Versions: Python, torch, and what fds stands on; which extras are there."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from fds import __version__
from fds.command_line.doctor.finding import Finding, Settings
from fds.command_line.program import version

TRIED = {"Python": ("3.11", "3.13"), "torch": ("2.11", "2.13")}  # the first and the last that fds was tried on
NEEDED = ("numpy", "attrs", "cattrs", "safetensors", "xxhash", "rich")
EXTRAS = {  # extra -> package, and what it is for
    "plot": ("matplotlib", "pictures: fds plans --png, and loss curves"),
    "hjson": ("hjson", "configurations with comments"),
}


def software(settings: Settings) -> Iterator[Finding]:
    """Find versions, and whether they are among those that fds was tried on."""
    spec = importlib.util.find_spec("fds")
    home = Path(spec.origin).parent if spec is not None and spec.origin else Path("?")
    yield Finding("fds", f"{__version__} in {home}", values={"version": __version__})
    yield in_range("Python", platform.python_version(), f"{platform.python_version()} at {sys.executable}")
    yield _torch()
    for name in NEEDED:
        found = version(name)
        missing = found == "not installed"
        yield Finding(name, found, "problem" if missing else "ok", f"pip install {name}" if missing else "")
    yield _triton()
    for extra, (package, use) in EXTRAS.items():
        found = version(package)
        missing = found == "not installed"
        yield Finding(f"fds[{extra}]", f"{package} {found}", advice=f"for {use}: pip install {package}" * missing)


def in_range(name: str, number: str, found: str) -> Finding:
    """Return the finding of a version: older than what was tried is a problem, newer is a note."""
    oldest, newest = TRIED[name]
    values = {"version": number, "tried": [oldest, newest]}
    if _key(number) < _key(oldest):
        return Finding(name, found, "problem", f"fds needs {name} {oldest} or later", values)
    if _key(number)[:2] > _key(newest):
        return Finding(name, found, "note", f"fds was tried on {name} {oldest} to {newest}", values)
    return Finding(name, found, values=values)


def _key(number: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", number)[:2]))


def _torch() -> Finding:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        return Finding("torch", f"cannot be imported: {reason}", "problem", "pip install torch: https://pytorch.org")
    build = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" * bool(torch.version.hip)
    )
    return in_range("torch", torch.__version__, f"{torch.__version__}, built for {build or 'the CPU'}")


def _triton() -> Finding:
    found = version("triton")
    if found == "not installed":
        advice = "kernels run as their references, in plain torch; on Linux: pip install triton"
        return Finding("triton", found, "note" if sys.platform == "linux" else "ok", advice)
    return Finding("triton", found)
