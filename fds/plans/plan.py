"""`Plan`: one row of actions per rank, values that print as `0: 0F0 0BW0` and parse back; how pictures colour them."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from fds import _html
from fds.errors import PlanError, did_you_mean


class Op(enum.Enum):
    """The operation of an action; its value is how it prints."""

    FORWARD = "F"
    BACKWARD_INPUT = "B"  # gradients with respect to the stage's input, which the previous stage waits for
    BACKWARD_WEIGHT = "W"  # gradients with respect to its parameters, at any time after B
    BACKWARD = "BW"  # B and W at once
    # added by lowering
    LOAD = "LOAD"  # a microbatch: inputs on the first stage, targets on the last
    SEND_ACTIVATION = "SEND_ACT"  # to the next stage
    RECV_ACTIVATION = "RECV_ACT"  # from the previous stage
    SEND_GRAD = "SEND_GRAD"  # to the previous stage
    RECV_GRAD = "RECV_GRAD"  # from the next stage
    REDUCE_TIED_GRADS = "REDUCE_TIED"  # among the stages that share parameters
    REDUCE_GRADS = "REDUCE"  # over the data axis
    OPTIMIZER_STEP = "STEP"


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD})
SENDS = frozenset({Op.SEND_ACTIVATION, Op.SEND_GRAD})
RECVS = frozenset({Op.RECV_ACTIVATION, Op.RECV_GRAD})
_OPS = {op.value: op for op in Op}
_FORM = re.compile(r"(?:(\d+)([A-Z][A-Z_]*)(\d+)(?:@(\d+))?|([A-Z][A-Z_]*))")


@attrs.frozen(repr=False)
class Action:
    """One operation of a rank: for a stage and a microbatch, or (the last three) once per step.

    >>> Action(2, Op.FORWARD, 0), Action.parse("1SEND_GRAD3@0").op
    (2F0, <Op.SEND_GRAD: 'SEND_GRAD'>)
    """

    stage: int | None
    op: Op
    microbatch: int | None = None
    buffer: int | None = None  # index among the buffers of the stage, once assigned

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that prints as `text`. Raises `PlanError`."""
        match = _FORM.fullmatch(text)
        word = match and (match[2] or match[5])
        if match is None or word not in _OPS:
            raise PlanError(
                "not an action",
                got=repr(text),
                want="such as 2F0: stage, operation, microbatch",
                hint=_hint(text, word),
            )
        stage, _, microbatch, buffer, _ = match.groups()
        number = lambda digits: None if digits is None else int(digits)
        return cls(number(stage), _OPS[word], number(microbatch), number(buffer))

    def __str__(self) -> str:
        if self.stage is None:
            return self.op.value
        at = "" if self.buffer is None else f"@{self.buffer}"
        return f"{self.stage}{self.op.value}{self.microbatch}{at}"

    __repr__ = __str__


def _hint(text: str, word: str | None) -> str:
    if re.fullmatch(r"\d+:?", text):
        return "Plan.parse reads the text of a whole plan, whose rows begin with their ranks"
    if swapped := re.fullmatch(r"([A-Z_]+?)(\d+)", text):
        return f"the stage comes first: 0{text}" if swapped[1] in _OPS else did_you_mean(swapped[1], _OPS)
    return did_you_mean(word, _OPS) if word else ""


Rows = Iterable[Iterable["Action | str | None"]]
PipelineSchedule = Callable[[int, int], "Plan | Rows"]  # (number of ranks, number of microbatches) -> the plan


def _read(rows: Any) -> tuple[tuple[Action, ...], ...]:
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


COLORS = {  # red, green, blue, from 0 to 1
    Op.FORWARD: (0.34, 0.71, 0.91),
    Op.BACKWARD_INPUT: (0.90, 0.62, 0.00),
    Op.BACKWARD_WEIGHT: (0.00, 0.62, 0.45),
    Op.BACKWARD: (0.80, 0.47, 0.65),
}
LABELS = {
    Op.FORWARD: "F: forward",
    Op.BACKWARD_INPUT: "B: input gradients",
    Op.BACKWARD_WEIGHT: "W: weight gradients",
    Op.BACKWARD: "BW: both",
}
OTHER = (0.7, 0.7, 0.7)  # messages, and what happens once a step


def color(action: Action, stages: tuple[int, ...]) -> tuple[float, float, float]:
    """Return the colour of an action; of the stages of its rank, later ones are paler."""
    if action.op not in COMPUTE:
        return OTHER
    place = stages.index(action.stage) if action.stage in stages else 0  # type: ignore[arg-type]
    white = 0.6 * place / max(len(stages) - 1, 1)
    red, green, blue = (c + (1 - c) * white for c in COLORS[action.op])
    return red, green, blue


def legend(actions: Iterable[Action]) -> list[tuple[str, str]]:
    """Return the colour, as hexadecimal digits, and the meaning of each kind of computation among the actions."""
    used = {action.op for action in actions}
    return [(digits(COLORS[op]), LABELS[op]) for op in COLORS if op in used]


def digits(rgb: tuple[float, float, float]) -> str:
    """Return a colour as six hexadecimal digits.

    >>> digits((1.0, 0.5, 0.0))
    'ff8000'
    """
    return "".join(f"{round(255 * c):02x}" for c in rgb)
