"""Pieces of the page: text is escaped, unless it is `Html` already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from fds import _html

MOST_TEXT = 200_000  # characters of a text


class Html(str):
    """Text that is HTML."""


def html(text: str) -> str:
    """Return text as HTML; of a long one the beginning."""
    if isinstance(text, Html):
        return text
    more = f"\n... of {len(text):,} characters" * (len(text) > MOST_TEXT)
    return escape(text[:MOST_TEXT] + more)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """Return a table whose first column names its rows; empty without rows.

    Args:
        head: above the columns, or nothing.
        rows: of cells, the first `_html.MOST` of which are shown.
        numbers: whether the other columns are aligned right, as numbers are.
    """
    rows = list(rows)
    if not rows:
        return ""
    above = "".join(f'<th scope="col">{html(name)}</th>' if name else "<td></td>" for name in head)
    lines = "".join(
        f'<tr><th scope="row">{html(row[0])}</th>{"".join(f"<td>{html(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows[: _html.MOST]
    )
    more = _html.text(f"and {len(rows) - _html.MOST:,} more") if len(rows) > _html.MOST else ""
    kind = ' class="numbers"' * numbers
    return (
        f'<div class="scrolls"><table{kind}><thead><tr>{above}</tr></thead><tbody>{lines}</tbody></table></div>{more}'
    )


def pairs(rows: Iterable[tuple[str, str]], kind: str) -> str:
    """Return names and texts, in as many columns as fit: `kind` is "cards" or "options". Empty without rows."""
    lines = "".join(f"<div><dt>{html(name)}</dt><dd>{html(text)}</dd></div>" for name, text in rows)
    return f'<dl class="{kind}">{lines}</dl>' if lines else ""


def folded(title: str, text: str, *, opened: bool = False) -> str:
    """Return a text as it is, under a title that opens it; empty without a text."""
    inside = text if isinstance(text, Html) else f'<pre tabindex="0">{html(text)}</pre>'
    return f"<details{' open' * opened}><summary>{html(title)}</summary>{inside}</details>" if text else ""


def bar(amounts: Mapping[str, tuple[float, str]], show: Callable[[float], str], head: str) -> str:
    """Return amounts that add up, each with its colour, as one bar and a table with their shares; empty for nothing."""
    whole = sum(amount for amount, _ in amounts.values())
    if not whole > 0:
        return ""
    pieces = "".join(
        f'<i style="flex-grow:{amount / whole:.4f};background:{color}" title="{html(f"{name}: {show(amount)}")}"></i>'
        for name, (amount, color) in amounts.items()
        if amount > 0
    )
    rows = [(swatch(name, color), show(amount), f"{amount / whole:.1%}") for name, (amount, color) in amounts.items()]
    drawn = f'<div class="bar" aria-hidden="true">{pieces}</div>'
    return drawn + table(("", head, "share"), [*rows, ("all", show(whole), "")], numbers=True)


def swatch(name: str, color: str) -> Html:
    """Return a name beside its colour."""
    return Html(f'<i class="swatch" style="background:{color}"></i>{html(name)}')


def run_color(index: int) -> str:
    """Return the colour of a run, which follows the page's scheme."""
    return f"var(--run{index % 8})"
