"""Fewer cases than a full cross, in which every pair of values (or every triple) still meets.

Most faults need one or two values together. A cross of five parameters with three values each has 243 cases; all pairs
meet in some 12 of them. Where the law is of three parameters, `strength=3`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from typing import TypeVar

Row = TypeVar("Row", bound=tuple[Hashable, ...])


def covering(rows: Iterable[Row], strength: int = 2) -> list[Row]:
    """Return some of the rows, in their order, that have every combination of `strength` values that all rows have.

    Greedy, and the same every time: the row with most combinations that are still missing comes next.
    """
    given = list(rows)
    meets = [frozenset(itertools.combinations(enumerate(row), strength)) for row in given]
    missing, taken = set[tuple](frozenset().union(*meets)), []
    while missing:
        best = max(range(len(given)), key=lambda i: len(meets[i] & missing))
        missing -= meets[best]
        taken.append(best)
    return [given[i] for i in sorted(taken)]
