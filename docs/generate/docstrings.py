"""Docstrings of fds are plain text; this writes them as the Markdown that shows them as they were meant."""

from __future__ import annotations

import html
import re
from collections.abc import Collection

import public

LABELS = r"(?:The step raises|Raises|Source|Slots?|Metrics|Laws?)"  # what opens a line of its own
SPAN = re.compile(r"(`+)(.+?)\1")


def markdown(text: str, scope: str = "fds", own: Collection[str] = ()) -> str:
    """Return a docstring as Markdown.

    Examples become fenced blocks, `::` opens a literal block, a line that begins with a label begins a paragraph, and
    names in backticks are linked: names of the room `scope`, of fds, or of its errors, but for the object's `own`.
    """
    lines, found = text.splitlines(), []
    while lines:
        if lines[0].lstrip().startswith(">>>"):
            found += _example(lines)
        elif re.match(r"=+( +=+)+$", lines[0]):
            found += _table(lines, scope, own)
        elif found and found[-1].endswith("::") and not lines[0].strip():
            found[-1] = found[-1][:-1]
            found += _literal(lines)
        elif lines[0].startswith("    ") and (not found or not found[-1].strip()) and not _is_section(found):
            found += _literal(lines)
        else:
            found += _prose(lines.pop(0), found, scope, own)
    return "\n".join(found)


def _is_section(before: list[str]) -> bool:
    """Say whether the indented lines to come still belong to a section such as `Args:`."""
    heads = [line for line in before if line and not line.startswith(" ")]
    return bool(heads) and bool(re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", heads[-1]))


def _table(lines: list[str], scope: str, own: Collection[str]) -> list[str]:
    """Return a table whose columns are as wide as the runs of `=` above it, and whose header is between two of them."""
    starts = [run.start() for run in re.finditer("=+", lines[0])]
    ends = [*(start - 1 for start in starts[1:]), None]
    parts: list[list[str]] = [[]]
    lines.pop(0)
    while lines and lines[0].strip():
        line = lines.pop(0)
        if line.startswith("=="):
            parts.append([])
            continue
        cells = [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]
        parts[-1].append("| " + " | ".join(_prose(cell, [], scope, own)[0] for cell in cells) + " |")
    header = parts[0] if len(parts) > 2 else ["|" + " |" * len(starts)]
    return ["", *header, "|" + " --- |" * len(starts), *(parts[1] if len(parts) > 2 else parts[0]), ""]


def _example(lines: list[str]) -> list[str]:
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    block = []
    while lines and lines[0].strip():
        block.append(lines.pop(0))
    return ["", f"{indent}```pycon", *block, f"{indent}```"]


def _literal(lines: list[str]) -> list[str]:
    block = []
    while lines and (not lines[0].strip() or lines[0].startswith("    ")):
        block.append(lines.pop(0))
    while block and not block[0].strip():
        block.pop(0)
    while block and not block[-1].strip():
        block.pop()
    return ["", "```text", *(line[4:] for line in block), "```", ""]


def _prose(line: str, before: list[str], scope: str, own: Collection[str]) -> list[str]:
    escaped = _outside_code(line, lambda text: re.sub(r"<(?=[\w/])", "&lt;", text))
    linked = SPAN.sub(lambda span: link(span[0], span[2], scope, own), escaped)
    label = re.match(rf"({LABELS})(:? )(?=\S)", linked)
    if label:
        linked = f"**{label[1]}**{label[2]}{linked[label.end() :]}"
    starts = bool(label) and bool(before) and bool(before[-1].strip())
    return ["", linked] if starts else [linked]


def _outside_code(line: str, change) -> str:
    parts, at = [], 0
    for span in SPAN.finditer(line):
        parts += [change(line[at : span.start()]), span[0]]
        at = span.end()
    return "".join([*parts, change(line[at:])])


def link(span: str, code: str, scope: str, own: Collection[str]) -> str:
    """Return an inline code as a link to the public name that it is, or as it was."""
    match = re.fullmatch(r"([A-Za-z_][\w.]*)(?:\(.*\))?", code)
    if not match or match[1] in own:
        return span
    for path in (f"{scope}.{match[1]}", match[1], f"fds.{match[1]}", f"fds.errors.{match[1]}"):
        target = paths().get(path)
        if target:
            return f"[{span}][{target}]"
    return span


def paths() -> dict[str, str]:
    """Return every path under which a public name may be written, with the path under which it is described."""
    if not _PATHS:
        homes = {(name.module, name.name): name.path for name in public.names()}
        for module in ("fds", *(room for room in public.ROOMS if room != "fds.transforms")):
            for name in public.exported(module):
                target = homes.get(public.definition(module, name))
                if target:
                    _PATHS[f"{module}.{name}"] = target
    return _PATHS


_PATHS: dict[str, str] = {}


def card(text: str, name: str) -> str:
    """Return the card of a transform, of those that open its file, as a list of definitions, or "" for none."""
    parts = text.split("\n\n")
    after = next((i for i, part in enumerate(parts) if part.startswith(f"`{name}`: ")), 0)
    block = parts[after + 1] if after + 1 < len(parts) else ""
    if not block.startswith("Fills:"):
        return ""
    joined = re.sub(r"\n\s+", " ", block)
    fields = re.findall(r"(?:^|\s{2,})(Fills|State|Law|Cost|Source):\s+(.*?)(?=\s{2,}State:|$)", joined, re.MULTILINE)
    items = (f"<dt>{name}</dt> <dd>{_inline(value)}</dd>" for name, value in fields)
    return f'<dl class="card">{" ".join(items)}</dl>'


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
