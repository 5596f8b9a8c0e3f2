"""What notebooks show of values of fds: small pieces of HTML, escaped, without scripts, in the page's own colours."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

import attrs

MOST = 200  # rows of a table; more are counted, not shown
MOST_BARS = 4000  # of a picture
_LINE = "rgba(128,128,128,.35)"  # visible on light and on dark
_WIDE, _TALL = 720, 18  # of a picture, and of a lane, in pixels
_TABLE = "border-collapse:collapse;margin:.3em 0;font-size:.92em"
_CODE = "margin:.3em 0;white-space:pre-wrap;background:none;color:inherit"


@attrs.frozen
class Bar:
    """A bar of a lane: where it is, its colour as hexadecimal digits, what is written in it and shown on hovering."""

    start: float
    end: float
    color: str
    text: str
    title: str = ""


def box(title: str, *parts: str) -> str:
    """Return a box with a title (text) and its parts (HTML)."""
    style = f"border:1px solid {_LINE};border-radius:6px;padding:.5em .8em;margin:.3em 0;max-width:60em;overflow-x:auto"
    return f'<div style="{style}"><strong>{escape(title)}</strong>{"".join(parts)}</div>'


def table(rows: Iterable[Sequence[object]], *, head: Sequence[str] = (), right: Collection[int] = ()) -> str:
    """Return a table of texts; the columns in `right` are aligned right, as numbers are."""
    rows = list(rows)

    def line(tag: str, cells: Sequence[object]) -> str:
        sides = ("right" if i in right else "left" for i in range(len(cells)))
        style = f"padding:.1em .8em .1em 0;vertical-align:top;border-bottom:1px solid {_LINE};text-align"
        made = (
            f'<{tag} style="{style}:{side}">{escape(str(cell))}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    lines = [line("th", head)] if head else []
    lines += [line("td", row) for row in rows[:MOST]]
    more = text(f"and {len(rows) - MOST:,} more") if len(rows) > MOST else ""
    return f'<table style="{_TABLE}">{"".join(lines)}</table>{more}'


def text(words: str) -> str:
    """Return a line of text."""
    return f'<div style="opacity:.75">{escape(words)}</div>'


def code(words: str) -> str:
    """Return text as it is, in a font of one width."""
    return f'<pre style="{_CODE}">{escape(words)}</pre>'


def closed(title: str, inside: str) -> str:
    """Return HTML that is shown when its title is clicked."""
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def filled(fraction: float) -> str:
    """Return a bar of which a fraction, from 0 to 1, is filled."""
    inside = f'<div style="width:{100 * min(max(fraction, 0.0), 1.0):.1f}%;height:6px;background:#5c6bc0"></div>'
    return f'<div style="background:{_LINE};border-radius:3px;overflow:hidden;margin:.3em 0">{inside}</div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return what the colours of a picture mean: pairs of hexadecimal digits and words."""
    square = "display:inline-block;width:.8em;height:.8em;margin:0 .3em 0 0"
    words = (
        f'<span style="margin-right:1em"><span style="{square};background:#{color}"></span>{escape(meaning)}</span>'
        for color, meaning in entries
    )
    return f'<div style="opacity:.75">{"".join(words)}</div>'


def lanes(rows: Sequence[Sequence[Bar]], end: float) -> str:
    """Return a picture of bars from 0 to `end`, a lane per row, numbered; of more than `MOST_BARS` their number."""
    if (num_bars := sum(map(len, rows))) > MOST_BARS:
        return text(f"{num_bars:,} bars in {len(rows)} lanes, too many for a small picture")
    margin, scale = 28, (_WIDE - 28) / (end or 1.0)
    out = []
    for number, row in enumerate(rows):
        y = number * _TALL
        out.append(f'<text x="0" y="{y + 13}" fill="currentColor" font-size="11">{number}</text>')
        for bar in row:
            x, width = margin + bar.start * scale, max((bar.end - bar.start) * scale - 0.5, 0.5)
            shape = f'x="{x:.1f}" y="{y + 1}" width="{width:.1f}" height="{_TALL - 2}" fill="#{bar.color}"'
            out.append(f"<rect {shape}><title>{escape(bar.title or bar.text)}</title></rect>")
            if width > 7 * len(bar.text):
                out.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 13}" fill="#000" font-size="10" text-anchor="middle">'
                    f"{escape(bar.text)}</text>"
                )
    size = f'viewBox="0 0 {_WIDE} {max(len(rows), 1) * _TALL}" style="width:100%;max-width:{_WIDE}px"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{"".join(out)}</svg>'


def num_bytes(n: int) -> str:
    """Return a number of bytes for people.

    >>> num_bytes(999), num_bytes(12_345_678)
    ('999 B', '12.3 MB')
    """
    size, unit = float(n), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{n} B" if unit == "B" else f"{size:.1f} {unit}"
