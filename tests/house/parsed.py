"""The syntax trees of the files of fds, which several tests of the house read: parsed once a process."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return the tree of every file of fds, which nobody changes."""
    return {path: ast.parse(path.read_text()) for path in sorted((ROOT / "fds").rglob("*.py"))}
