"""The packages that a run needs, looked for and not imported: this module imports nothing but the standard library."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib.util import find_spec

# Package -> the module that it brings. Triton has no wheels but for Linux.
TO_RUN = {name: name for name in ("torch", "numpy", "attrs", "cattrs", "safetensors", "xxhash", "rich")}
TO_RUN |= {"triton": "triton"} if sys.platform == "linux" else {}
TO_TEST = {"pytest": "pytest", "pytest-xdist": "xdist", "hypothesis": "hypothesis"}


def what_is_missing(packages: Mapping[str, str]) -> str:
    """Return which packages this Python lacks and what to write then, "" where it has all."""
    missing = [package for package, module in packages.items() if find_spec(module) is None]
    if not missing:
        return ""
    return (
        f"fds: {', '.join(missing)} cannot be imported by {sys.executable} (Python {platform.python_version()}).\n"
        "  Name a Python that has all:          make gpu GPU_PYTHON=.venv/bin/python ARGS=...\n"
        "  or a folder with what this one lacks: make gpu GPU_SITE=/tmp/site ARGS=...   (docs/gpu.md, Which wheels)"
    )
