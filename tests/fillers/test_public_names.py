"""What fillers import: torch, Python, and the doors of fds that documents for users show."""

import ast
from pathlib import Path

import pytest

PUBLIC = {"fds", "fds.collectives", "fds.errors", "fds.random", "fds.step", "fds.tree"}
FILLERS = [path for path in Path(__file__).parent.glob("[!_]*.py") if not path.stem.startswith("test_")]


@pytest.mark.parametrize("path", FILLERS, ids=lambda path: path.stem)
def test_a_filler_is_written_with_public_names_alone(path):
    tree = ast.parse(path.read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not [alias.name for alias in node.names if alias.name.startswith("_")]
            modules.add(node.module or ".")
        elif isinstance(node, ast.Attribute):  # and reaches into nothing
            assert not node.attr.startswith("_") or node.attr.endswith("__")
    assert {name for name in modules if name.split(".")[0] in ("fds", "tests", "")} <= PUBLIC
