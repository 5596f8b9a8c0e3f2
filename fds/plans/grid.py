"""`grid`: a plan as a table of ranks and time with one action marked, for errors."""

from __future__ import annotations

from collections.abc import Sequence

from fds.plans.plan import Plan

MAX_ROWS = 16
MAX_COLUMNS = 16
MAX_WIDTH = 100  # characters of the cells of a row


def grid(plan: Plan, columns: Sequence[Sequence[int]], rank: int, place: int) -> str:
    """Return the part of the ranks x time grid around an action, which is marked; a dot is a rank that waits.

    `columns` are the times of each rank's actions, increasing along a row.

    >>> print(grid(Plan.of([["0F0", "0BW0"], ["1F0", "1BW0"]]), [[0, 3], [1, 2]], 1, 1))
       0    1    2       3
    0: 0F0  .    .       0BW0
    1: .    1F0  >1BW0<  .
    """
    ranks = _window(rank, plan.num_ranks, MAX_ROWS)
    cells = {r: dict(zip(columns[r], map(str, plan.rows[r]), strict=True)) for r in ranks}
    centre = columns[rank][place]
    cells[rank][centre] = f">{plan.rows[rank][place]}<"
    num_columns = 1 + max(row[-1] for row in columns if row)
    shown = _window(centre, num_columns, MAX_COLUMNS)
    widths = {c: max(len(str(c)), *(len(cells[r].get(c, ".")) for r in ranks)) for c in shown}
    while sum(widths[c] + 2 for c in shown) > MAX_WIDTH and len(shown) > 1:
        shown = shown[1:] if centre - shown[0] > shown[-1] - centre else shown[:-1]
    label = 1 + len(str(ranks[-1]))
    before, after = "..  " * (shown[0] > 0), "  .." * (shown[-1] + 1 < num_columns)

    def line(name: str, texts: dict[int, str]) -> str:
        middle = "  ".join(texts.get(c, ".").ljust(widths[c]) for c in shown)
        return f"{name:<{label}} {before}{middle}{after}".rstrip()

    lines = [line("", {c: str(c) for c in shown}), *(line(f"{r}:", cells[r]) for r in ranks)]
    return "\n".join([lines[0], *["..."] * (ranks[0] > 0), *lines[1:], *["..."] * (ranks[-1] + 1 < plan.num_ranks)])


def _window(centre: int, size: int, most: int) -> range:
    """Return `most` numbers below `size` around `centre`, or all if there are fewer."""
    start = max(0, min(centre - most // 2, size - most))
    return range(start, min(size, start + most))
