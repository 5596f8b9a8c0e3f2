"""`Plan`: one row of actions per rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from fds import _html
from fds.errors import PlanError
from fds.plans.actions import COMPUTE, Action, Op
from fds.plans.colors import color, digits, legend

Rows = Iterable[Iterable["Action | str | None"]]
PipelineSchedule = Callable[[int, int], "Plan | Rows"]  # (number of ranks, number of microbatches) -> the plan


def _read(rows: Any) -> tuple[tuple[Action, ...], ...]:
    """Parse rows of actions or of their texts. Raises `PlanError`."""
    if isinstance(rows, str) or not isinstance(rows, Iterable):
        raise _not_a_plan(rows)
    return tuple(map(_read_row, rows))


def _read_row(row: Any) -> tuple[Action, ...]:
    if not isinstance(row, Iterable):
        raise _not_a_plan(row)
    actions = row.split() if isinstance(row, str) else [a for a in row if a is not None]
    parsed = tuple(Action.parse(a) if isinstance(a, str) else a for a in actions)
    for action in parsed:
        if not isinstance(action, Action):
            raise _not_a_plan(action)
    return parsed


def _not_a_plan(got: Any) -> PlanError:
    return PlanError(
        "not a plan",
        got=repr(got)[:80],
        want='rows such as [["0F0", "0BW0"], ["1F0", "1BW0"]]',
        hint="Plan.parse reads the text of a whole plan" if isinstance(got, str) else "",
    )


@attrs.frozen(slots=False, repr=False)
class Plan:
    """One row of actions per rank, done in order, each once its dependencies are done.

    Rows contain actions or their texts; None, a tick without work, is left out. A row can be one text: `"0F0 0BW0"`.
    Raises `PlanError` for anything else.

    >>> print(Plan([["0F0", "0BW0"], ["1F0", "1BW0"]]))
    0: 0F0 0BW0
    1: 1F0 1BW0
    """

    rows: tuple[tuple[Action, ...], ...] = attrs.field(converter=_read)

    @classmethod
    def of(cls, rows: Plan | Rows) -> Plan:
        """Return a plan as it is, or the plan of these rows."""
        return rows if isinstance(rows, Plan) else cls(rows)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Return the plan that prints as `text`. Raises `PlanError`."""
        rows = []
        for i, line in enumerate(filter(None, map(str.strip, text.splitlines()))):
            rank, colon, actions = line.partition(":")
            if not colon or rank.strip() != str(i):
                raise PlanError("a row does not begin with its rank", where=f"row {i}", got=line[:60], want=f"{i}: ...")
            rows.append(actions.split())
        return cls.of(rows)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @functools.cached_property
    def num_stages(self) -> int:
        """Number of stages."""
        return 1 + max((a.stage for row in self.rows for a in row if a.stage is not None), default=-1)

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches."""
        return 1 + max((a.microbatch for row in self.rows for a in row if a.microbatch is not None), default=-1)

    @functools.cached_property
    def placement(self) -> dict[int, int]:
        """The rank of every stage: where its forwards are."""
        return {a.stage: rank for rank, row in enumerate(self.rows) for a in row if a.op is Op.FORWARD}  # type: ignore

    @functools.cached_property
    def trains(self) -> bool:
        """Whether there are backwards."""
        return any(a.op in COMPUTE and a.op is not Op.FORWARD for row in self.rows for a in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in order."""
        return tuple(sorted(stage for stage, r in self.placement.items() if r == rank))

    def __str__(self) -> str:
        return "\n".join(f"{rank}: {' '.join(map(str, row))}".rstrip() for rank, row in enumerate(self.rows))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        sizes = f"{self.num_stages} stages on {self.num_ranks} ranks, {self.num_microbatches} microbatches"
        lanes = [
            [
                _html.Bar(i, i + 1, digits(color(action, self.stages_of(rank))), f"{action.microbatch}", str(action))
                for i, action in enumerate(row)
            ]
            for rank, row in enumerate(self.rows)
        ]
        picture = _html.lanes(lanes, max(map(len, self.rows), default=1))
        hint = "in order, not in time: fds.plans.simulate(plan) says when each action runs"
        means = _html.legend(legend(action for row in self.rows for action in row))
        return _html.box(
            f"Plan: {sizes}", picture, means, _html.text(hint), _html.closed("rows", _html.code(str(self)))
        )
