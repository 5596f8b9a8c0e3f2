"""`Action`: one operation of one rank in a pipeline, a value that prints as `2F0` and parses back."""

from __future__ import annotations

import enum
import re

import attrs

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
