"""The gallery: the pictures of schedules that docs/pipelines.md shows, on one page."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "pipelines.md"
PICTURE = re.compile(r"^#+ (.+)\n+!\[([^]]+)\]\((images/[^)]+)\)", re.MULTILINE)


def page() -> str:
    """Return the Markdown of the gallery."""
    text = PAGE.read_text()
    lines = [
        "# Gallery of schedules",
        "",
        "Four ranks, eight microbatches; a lane is a rank, a bar one computation, its number the microbatch. "
        "[Pipelines](pipelines.md) tells how each works and prints it, `make gallery` draws them again.",
        "",
    ]
    for title, caption, path in PICTURE.findall(text):
        name = Path(path).stem
        facts = re.search(rf"^{name}\S* +(time .+)$", text, re.MULTILINE)
        lines += [f"## {title}", "", caption + ".", "", f"![{caption}]({path})", ""]
        lines += [f"`{' '.join(facts[1].split())}`", ""] if facts else []
    return "\n".join(lines)
