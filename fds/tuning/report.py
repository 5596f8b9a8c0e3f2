"""What a search has found: all candidates, ranked, with what was predicted beside what was measured."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs

from fds import _html
from fds.errors import FdsError
from fds.tuning.footprints import Footprint
from fds.tuning.prediction import Prediction
from fds.tuning.spaces import Candidate, Space
from fds.tuning.written import json_of, python_of

_HEAD = ("candidate", "outcome", "predicted ms", "measured ms", "rows/s", "predicted MB", "measured MB", "why")


@attrs.frozen
class Row:
    """What is known of a candidate.

    Attributes:
        candidate: its axes and choices.
        outcome: "tried"; "not tried", where the budget or the prediction left it out; "does not fit"; "refused", by
            composing or rehearsing it; "failed", "died" or "hung", in its trial.
        footprint: bytes and messages, before anything ran; None of what is refused.
        prediction: seconds; None where nothing was rehearsed.
        measured: seconds of a call on all ranks; None where it did not come to it.
        num_bytes: at the peak of a call, measured, of the rank that holds most.
        why: of an outcome that is not "tried".
    """

    candidate: Candidate
    outcome: str
    footprint: Footprint | None = None
    prediction: Prediction | None = None
    measured: float | None = None
    num_bytes: int | None = None
    why: str = ""


@attrs.frozen
class Report:
    """The rows of a search; `str()` of it is a table, the fastest first.

    Attributes:
        rows: a row for each candidate of the space, those that were tried first, by measured seconds.
        factors: of computing and of messages, which fit the trials (`fds.tuning.prediction`).
        num_rows: of the batch of all ranks.
        seconds: that the search took.
        space: what was searched.
    """

    rows: tuple[Row, ...]
    factors: tuple[float, float]
    num_rows: int
    seconds: float
    space: Space

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "rows", _sorted(self.rows, self.factors))

    @property
    def best(self) -> Row:
        """The fastest that was tried. Raises `FdsError` where none ran."""
        if not self.rows or self.rows[0].measured is None:
            raise FdsError("no candidate has run", got=str(self), hint="report.rows says why of each")
        return self.rows[0]

    def python(self) -> str:
        """Return a program that makes the best candidate: `mesh`, and `composition`, to be called with the loss."""
        return python_of(self.space, self.best.candidate)

    def to_json(self) -> str:
        """Return the best candidate as JSON: its axes and choices, seconds and bytes; `config` and what that leaves.

        `config` is a JSON of DeepSpeed for `fds.initialize(mesh=)`, with the optimizer where the composition has one of
        its own. `unsaid` lists what of the composition it does not say, or says otherwise.
        """
        best, candidate = self.best, self.best.candidate
        cost = {"seconds": best.measured, "num_bytes": best.num_bytes}
        keys = attrs.asdict(json_of(self.space, candidate, self.num_rows))
        return json.dumps({"axes": dict(candidate.axes), "choices": dict(candidate.choices), **cost, **keys})

    def __str__(self) -> str:
        table = [_HEAD, *map(self._cells, self.rows)]
        widths = [max(len(line[i]) for line in table) for i in range(len(_HEAD))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
        best = ["", self.python()] if self.rows and self.rows[0].measured is not None else []
        return "\n".join(line.rstrip() for line in [*lines, *self._notes(), *best])

    def _notes(self) -> list[str]:
        """Return what is not in the bytes that were predicted."""
        reasons = Counter(row.footprint.unknown for row in self.rows if row.footprint and not row.footprint.is_whole)
        return [f"{n} predicted without activations, by formulas: {reason}" for reason, n in reasons.items()]

    def _repr_html_(self) -> str:
        return _html.box(
            "Candidates",
            _html.table(map(self._cells, self.rows), head=_HEAD, right=range(2, 7)),
            *map(_html.code, self._notes()),
        )

    def _cells(self, row: Row) -> tuple[str, ...]:
        predicted = None if row.prediction is None else row.prediction.seconds(self.factors)
        speed = "" if row.measured is None else f"{self.num_rows / row.measured:,.0f}"
        weight = None if row.footprint is None else row.footprint.num_bytes
        times = (_number(predicted, 1e3), _number(row.measured, 1e3), speed)
        weights = (_number(weight, 1e-6), _number(row.num_bytes, 1e-6))
        return (str(row.candidate), row.outcome, *times, *weights, row.why)


def _number(value: Any, unit: float) -> str:
    return "" if value is None else f"{value * unit:,.1f}"


def _sorted(rows: Iterable[Row], factors: tuple[float, float]) -> tuple[Row, ...]:
    """Order rows: those that were tried, by seconds; then those rehearsed, by what is predicted; then the others."""
    predicted = lambda row: math.inf if row.prediction is None else row.prediction.seconds(factors)
    return tuple(sorted(rows, key=lambda row: (row.measured or math.inf, predicted(row))))
