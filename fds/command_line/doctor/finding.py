"""`Finding`: one thing that a check found, how bad it is, and what to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import attrs

Level = Literal["ok", "note", "problem"]  # a problem breaks training, or makes it something else than was meant


@attrs.frozen
class Finding:
    """One line of the report.

    Attributes:
        what: the thing: "torch".
        found: what it is: "2.13.0".
        level: whether to do something about it.
        advice: what to do, or why it is as it is; may be empty.
        values: numbers and texts for programs, with units in their names.
    """

    what: str
    found: str
    level: Level = "ok"
    advice: str = ""
    values: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen
class Settings:
    """How to check: the folder whose disk is measured, and whether to leave out what takes longer than a second."""

    dir: Path
    quick: bool


Check = Callable[[Settings], Iterator[Finding]]


def examine(check: Check, settings: Settings) -> Iterator[Finding]:
    """Yield what a check finds. A check that fails is itself a finding: the others go on."""
    try:
        yield from check(settings)
    except Exception as error:
        yield Finding(
            "this check",
            f"failed: {type(error).__name__}: {error}",
            "note",
            "it says nothing about your machine; please report it with this line",
        )
