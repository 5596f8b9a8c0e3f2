"""Outcomes: what a scenario of the campaign came to, and what is said of one that did not hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import attrs


@attrs.frozen
class Row:
    """A line of the table: how often something was done to a save, and how often what came of it."""

    scenario: str
    count: int
    outcomes: dict[str, int]


class Violation(AssertionError):
    """What must hold did not; the text says of what, and how to repeat it."""

    @classmethod
    @contextlib.contextmanager
    def told(cls, where: str) -> Iterator[None]:
        """Say where it was that something in the block did not hold, or raised."""
        try:
            yield
        except Exception as error:
            raise cls(f"{where}: {type(error).__name__}: {error}") from error
