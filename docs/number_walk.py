"""Write into docs/design/walk.md the lines at which the functions begin that it names.

An entry is `[step/program.py:76](../../fds/step/program.py#L76) `Step.__call__``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "design" / "walk.md"
ENTRY = re.compile(r"\[([\w/]+\.py):\d+\]\(\.\./\.\./fds/\1#L\d+\) `([\w.]+)`")


def line_of(path: str, name: str) -> int:
    """Return the line at which a function of fds begins, decorators aside. Raises `ValueError` for none."""
    nodes: list[ast.stmt] = ast.parse((ROOT / "fds" / path).read_text()).body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((x for x in nodes if isinstance(x, ast.ClassDef | ast.FunctionDef) and x.name == part), None)
        if node is None:
            raise ValueError(f"docs/design/walk.md names {name} of fds/{path}, which is not there")
        nodes = node.body
    assert node is not None
    return node.lineno


def numbered(text: str) -> str:
    """Return the page with the lines as they are."""

    def entry(match: re.Match[str]) -> str:
        path, name = match.groups()
        line = line_of(path, name)
        return f"[{path}:{line}](../../fds/{path}#L{line}) `{name}`"

    return ENTRY.sub(entry, text)


if __name__ == "__main__":
    PAGE.write_text(numbered(PAGE.read_text()))
