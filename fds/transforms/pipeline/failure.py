"""Failures: what went wrong in an action. Every rank learns of it and raises it, so that none waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from fds import errors
from fds.errors import FdsError, RankError
from fds.plans import Action, Op

_WORDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward (B)",
    Op.BACKWARD_WEIGHT: "backward (W)",
    Op.SEND_ACTIVATION: "output",
    Op.SEND_GRAD: "gradient",
    Op.RECV_ACTIVATION: "input",
    Op.RECV_GRAD: "gradient of the output",
}


@attrs.frozen
class Failure:
    """An error at a place of the plan: what came of it elsewhere has a later place."""

    place: int  # in the order of the whole plan; -1 before it begins
    where: str
    kind: str  # of the error
    fields: tuple[str, ...]  # of an `FdsError`; the text of any other
    error: Exception | None = attrs.field(default=None, eq=False)  # on the rank that failed

    @classmethod
    def of(cls, error: Exception, place: int = -1, action: Action | None = None) -> Failure:
        """Return the failure of an action, or of what comes before the first."""
        where = "" if action is None else f"stage {action.stage}, {_WORDS[action.op]} of microbatch {action.microbatch}"
        kind = type(error).__name__
        if isinstance(error, FdsError):
            kind = next(c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
            fields = tuple(map(_text, (error.what, error.where, error.got, error.want, error.hint)))
        else:
            fields = ("\n".join([_text(error), *map(_text, getattr(error, "__notes__", ()))]),)
        return cls(place, where, kind, fields, error)

    def json(self) -> list[Any]:
        """Return it for the other ranks."""
        return [self.place, self.where, self.kind, list(self.fields)]

    def alone(self) -> Exception:
        """Return what one process raises: an `FdsError` with stage and microbatch, any other with a note of them."""
        assert self.error is not None
        if isinstance(self.error, FdsError):
            return self.raised()
        self.error.add_note(f"in {self.where}" if self.where else "before the pipeline began")
        return self.error

    def raised(self, rank: str = "") -> FdsError:
        """Return what every rank raises: an `FdsError` as it was, with stage and microbatch; else `RankError`."""
        where = ", ".join(filter(None, [rank, self.where]))
        kind = getattr(errors, self.kind, None)
        if kind is not None and len(self.fields) == 5:
            what, place, got, want, hint = self.fields
            made = kind(what, where=": ".join(filter(None, [where, place])), got=got, want=want, hint=hint)
        else:
            made = RankError("a stage of the pipeline failed", where=where, got=f"{self.kind}: {self.fields[0]}")
        made.__cause__ = self.error
        return made


def _text(x: object) -> str:
    """Return a text of anything, even of what fails to say what it is: the other ranks wait for it."""
    try:
        return str(x)[:2000]
    except Exception as error:
        return f"(its text cannot be made: {type(error).__name__})"


def first(failures: Sequence[list[Any] | None]) -> tuple[int, Failure] | None:
    """Return which rank failed first, and how, given what `json` returned on those that did."""
    found = [(one[0], rank, one) for rank, one in enumerate(failures) if one is not None]
    if not found:
        return None
    _, rank, (place, where, kind, fields) = min(found, key=lambda one: one[:2])
    return rank, Failure(place, where, kind, tuple(fields))
