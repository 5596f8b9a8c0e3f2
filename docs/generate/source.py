"""Pages of source files that other pages link to."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml"}
HEAD = "---\nsearch:\n  exclude: true\n---\n"


def page(path: str) -> str:
    """Return the page that shows a file of the repository."""
    file = ROOT / path
    code = file.read_text().rstrip()
    fence = "```" if "```" not in code else "````"
    language = LANGUAGES.get(file.suffix, "text")
    return f"{HEAD}# {path}\n\n{fence}{{ .{language} linenums='1' }}\n{code}\n{fence}\n"


def modules(path: str) -> list[str]:
    """Return the modules of a folder, as paths in the repository."""
    return [f"{path}/{file.name}" for file in sorted((ROOT / path).glob("*.py"))]


def folder_page(path: str) -> str:
    """Return the page that lists the modules of a folder, each with what it says it does."""
    lines = [f"{HEAD}# {path}", "", "| | |", "| --- | --- |"]
    name = Path(path).name
    for module in modules(path):
        doc = ast.get_docstring(ast.parse((ROOT / module).read_text())) or ""
        first = doc.partition("\n")[0].replace("|", "\\|")
        lines.append(f"| [{Path(module).name}]({name}/{Path(module).name}.md) | {first} |")
    return "\n".join([*lines, ""])
