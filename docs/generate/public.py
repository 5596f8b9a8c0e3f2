"""The public names of fds and where each is defined, read from the sources: nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = (  # in the order of data flow
    "fds.loss",
    "fds.step",
    "fds.transforms",
    "fds.optim",
    "fds.schedules",
    "fds.collectives",
    "fds.state",
    "fds.autodiff",
    "fds.random",
    "fds.tree",
    "fds.layout",
    "fds.microbatches",
    "fds.media",
    "fds.plans",
    "fds.attention_layouts",
    "fds.kernels",
    "fds.nn",
    "fds.hf",
    "fds.profiling",
    "fds.curvature",
    "fds.storage",
    "fds.storage.foreign",
    "fds.data",
    "fds.display",
    "fds.monitors",
    "fds.timing",
    "fds.transports",
    "fds.compression",
    "fds.distill",
    "fds.adapters",
    "fds.debugging",
    "fds.reporting",
    "fds.config",
    "fds.trainer",
    "fds.elastic",
    "fds.tuning",
    "fds.command_line",
    "fds.errors",
)


@dataclass(frozen=True)
class Name:
    """A public name: its shortest path, and the module and the name under which it is defined."""

    path: str
    module: str
    name: str
    summary: str  # the first line of its docstring; of a value, the value

    @property
    def room(self) -> str:
        """The innermost room that holds its definition."""
        inside = [room for room in ROOMS if f"{self.module}.".startswith(f"{room}.")]
        return max(inside, key=len, default="fds")


def source_of(module: str) -> Path | None:
    """Return the file of a module of fds, or None where there is none."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@cache
def parse(module: str) -> ast.Module:
    """Return the syntax tree of a module of fds."""
    path = source_of(module)
    assert path, module
    return ast.parse(path.read_text(), str(path))


def docstring(module: str) -> str:
    """Return the docstring of a module."""
    return ast.get_docstring(parse(module)) or ""


def exported(module: str) -> list[str]:
    """Return the public names of a module: those of `__all__`, else the functions and classes that it defines."""
    for node in parse(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return list(dict.fromkeys(n.name for n in parse(module).body if isinstance(n, kinds) and n.name[0] != "_"))


@cache
def definition(module: str, name: str) -> tuple[str, str]:
    """Return the module and the name under which `module.name` is defined; of a module, itself and ""."""
    for node in _statements(parse(module).body):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fds"):
            for item in node.names:
                if (item.asname or item.name) == name:
                    inside = f"{node.module}.{item.name}"
                    is_module = node.module == module or item.name not in _names(node.module or "")
                    return (inside, "") if is_module else definition(node.module or "", item.name)
        elif name in _bound(node):
            return module, name
    if source_of(f"{module}.{name}"):
        return f"{module}.{name}", ""
    raise LookupError(f"{module} exports {name}, which it neither defines nor imports from fds")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield from _statements(node.body) if isinstance(node, ast.If) else [node]


def _names(module: str) -> set[str]:
    found = set()
    for node in _statements(parse(module).body):
        found.update(_bound(node))
        if isinstance(node, ast.ImportFrom):
            found.update(item.asname or item.name for item in node.names)
    return found


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (it.id for it in ast.walk(target) if isinstance(it, ast.Name))


def summary(module: str, name: str) -> str:
    """Return the first line of the docstring of a definition; of a value, the value."""
    for node in parse(module).body:
        if isinstance(node, ast.Assign) and name in _bound(node):
            return f"`{ast.unparse(node.value)}`"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


@cache
def names() -> tuple[Name, ...]:
    """Return every public name once, under its shortest path, in the order of `fds` and then of the rooms."""
    found: dict[tuple[str, str], Name] = {}
    for module in ("fds", *(room for room in ROOMS if room != "fds.transforms")):
        for name in vocabulary() if module == "fds" else exported(module):
            home = definition(module, name)
            if home[1] and home not in found:
                found[home] = Name(f"{module}.{name}", *home, summary(*home))
    return tuple(found.values())


@cache
def vocabulary() -> tuple[str, ...]:
    """Return the names of `fds.__all__` in the order of data flow, which is that of its imports."""
    order = [
        alias.asname or alias.name
        for node in _statements(parse("fds").body)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    return tuple(sorted(exported("fds"), key=lambda name: order.index(name) if name in order else len(order)))


def groups(module: str) -> list[tuple[str, list[str]]]:
    """Return the names of a module under the comments above them in its `__all__`."""
    path = source_of(module)
    assert path
    found: list[tuple[str, list[str]]] = [("", [])]
    for line in path.read_text().partition("__all__ = [")[2].splitlines():
        if re.match(r"\s*#", line):
            found.append((line.strip("# "), []))
        found[-1][1].extend(re.findall(r'"(\w+)"', line))
    return [(title, members) for title, members in found if members]
