"""Links that work on disk, rewritten to the pages of the site that show the same files."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "ARCHITECTURE.md": "architecture.md",
    "LICENSE": "source/LICENSE.md",
    "examples": "examples/index.md",
    "examples/README.md": "examples/index.md",
    "examples/gpt": "examples/gpt.md",
    "benchmarks/README.md": "results/measuring.md",
    "benchmarks/results": "results/index.md",
}
FENCE = re.compile(r"^(```|~~~).*?^\1[ ]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=[)\s])")


def page_of(path: str) -> str:
    """Return the path in the site of the page, or the picture, that shows a file of the repository."""
    path = path.rstrip("/")
    if path in ROOT_PAGES:
        return ROOT_PAGES[path]
    top, _, rest = path.partition("/")
    if top == "docs":
        return rest
    if path.startswith("examples/gpt/"):
        return ROOT_PAGES["examples/gpt"]
    if top == "examples":
        return str(PurePosixPath(path).with_suffix(".md"))
    if path.startswith("benchmarks/results/"):
        return path.removeprefix("benchmarks/")
    return f"source/{path}.md"


def rewrite(text: str, file: str, page: str) -> str:
    """Return the Markdown of `file`, a path in the repository, with its links as they are on `page` of the site."""

    def change(match: re.Match) -> str:
        target, hash_, anchor = match[1].partition("#")
        if not target or re.match(r"[a-z]+:|/", target):
            return match[1]
        there = os.path.normpath(os.path.join(os.path.dirname(file), target))
        to = page_of(there)
        anchor = re.sub(r"^L(\d+)$", r"__codelineno-0-\1", anchor)  # a line of a file, as GitHub and the site name it
        return os.path.relpath(to, os.path.dirname(page) or ".") + hash_ + anchor

    return outside_fences(text, lambda part: LINK.sub(change, part))


def targets(text: str, file: str) -> Iterator[str]:
    """Yield the files of the repository to which a Markdown file links."""
    for target in LINK.findall(FENCE.sub("", text)):
        path = target.partition("#")[0]
        if path and not re.match(r"[a-z]+:|/", path):
            yield os.path.normpath(os.path.join(os.path.dirname(file), path))


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Return a text with `change` applied to what is outside fenced blocks."""
    parts, at = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, change(text[at:])])
