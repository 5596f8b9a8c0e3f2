"""Pictures of what ranks do when: of a plan, simulated, and of a trace, measured."""

from __future__ import annotations

import math
from typing import Any

import attrs

from fds import _html
from fds.reporting.metrics import PARTS

WHOLE = "step"  # the range of a whole call


@attrs.frozen
class Slice:
    """A range of a rank, in milliseconds."""

    rank: int
    name: str
    start: float
    ms: float

    @property
    def part(self) -> str:
        """The part of a step that it is: `backward` of `backward/stage1/microbatch0`."""
        return self.name.split("/")[0].removesuffix("_weight")


def slices(events: list[Any]) -> list[Slice]:
    """Return the ranges of a file of `fds.trace`, outer ones before those inside; what is none is left out."""
    found: list[Slice] = []
    for event in events:
        match event:
            case {"ph": "X", "pid": int(rank), "name": str(name), "ts": float(at), "dur": float(us)} if (
                math.isfinite(at) and 0 <= us < math.inf
            ):
                found.append(Slice(rank, name, at / 1e3, us / 1e3))
    return sorted(found, key=lambda one: (one.rank, one.start, -one.ms))


def busy(events: list[Any]) -> dict[int, float]:
    """Return rank -> milliseconds from its first part to its last, without the waits for messages."""
    found: dict[int, float] = {}
    for one in slices(events):
        sign = {WHOLE: 1.0, "wait": -1.0}.get(one.part, 0.0)
        found[one.rank] = found.get(one.rank, 0.0) + sign * one.ms
    return {rank: ms for rank, ms in found.items() if ms > 0}


def picture(events: list[Any]) -> str:
    """Return a trace as HTML: a lane for each rank, a bar for each part, and what the colours mean."""
    found = [one for one in slices(events) if one.part != WHOLE]
    end = max((one.start + one.ms for one in found), default=0.0)
    rows = [[_bar(one) for one in found if one.rank == rank] for rank in sorted({one.rank for one in found})]
    parts = [part for part in PARTS if any(one.part == part for one in found)]
    means = _html.legend((PARTS[part][1][1:], part) for part in parts)
    return _html.lanes(rows, end) + means + _html.text(f"{end:,.1f} ms from left to right")


def _bar(one: Slice) -> _html.Bar:
    color = PARTS.get(one.part, PARTS["other"])[1][1:]
    return _html.Bar(one.start, one.start + one.ms, color, "", f"{one.name}: {one.ms:.3f} ms from {one.start:.3f} ms")
