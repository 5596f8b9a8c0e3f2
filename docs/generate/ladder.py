"""A page for every example: what it teaches, and its source, in which what the rung before lacks is marked."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"


def rungs() -> list[Path]:
    """Return the files of the ladder in order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def pages() -> dict[str, str]:
    """Return the Markdown of every example's page by its path in the site."""
    found = {}
    before = None
    for path in rungs():
        found[f"examples/{path.stem}.md"] = _page(path, before)
        before = path
    found["examples/train_gpt.md"] = _page(FOLDER / "train_gpt.py", None)
    found["examples/gpt.md"] = _folder(FOLDER / "gpt")
    return found


def _page(path: Path, before: Path | None) -> str:
    doc, code = parted(path.read_text())
    first, _, rest = doc.partition("\n")
    number, _, name = path.stem.partition("_") if path.stem[0].isdigit() else ("", "", path.stem)
    title = f"{number} {name.replace('_', ' ')}".strip()
    marked = new_lines(parted(before.read_text())[1], code) if before else []
    runs = f"python examples/{path.name}"
    lines = [f"# {title}", "", f"**{first}**", "", rest.strip(), "", "```console", f"$ {runs}", "```", ""]
    if marked and before:
        lines += [f"Marked: what is not in [{before.stem}]({before.stem}.md).", ""]
    option = f' hl_lines="{_ranges(marked)}"' if marked else ""
    return "\n".join([*lines, f'```{{ .python title="examples/{path.name}"{option} }}', code.rstrip(), "```", ""])


def parted(source: str) -> tuple[str, str]:
    """Return the docstring of a program, and its code without it."""
    node = ast.parse(source)
    end = node.body[0].end_lineno or 0
    return ast.get_docstring(node) or "", "\n".join(source.splitlines()[end:]).strip("\n")


def new_lines(before: str, code: str) -> list[int]:
    """Return the numbers of the lines of `code`, from 1 on, that `before` does not have in this order."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), code.splitlines(), autojunk=False)
    lines = code.splitlines()
    changed = [i for tag, *_, start, stop in matcher.get_opcodes() if tag != "equal" for i in range(start, stop)]
    return [i + 1 for i in changed if lines[i].strip()]


def _ranges(numbers: list[int]) -> str:
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return " ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in found)


def _folder(folder: Path) -> str:
    lines = ["# Parts of train_gpt", "", "What [train_gpt.py](train_gpt.md) is made of.", ""]
    for path in sorted(folder.glob("[!_]*.py")):
        doc, code = parted(path.read_text())
        lines += [f"## {path.name}", "", doc, "", f'```{{ .python title="examples/gpt/{path.name}" }}', code, "```", ""]
    return "\n".join(lines)
