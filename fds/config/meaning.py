"""What a key of DeepSpeed's JSON means here: an argument of fds, nothing and why, or a feature not there yet."""

from __future__ import annotations

import attrs


@attrs.frozen
class Argument:
    """It becomes an argument of a transform, an optimizer or a schedule.

    Attributes:
        of: the functions that may take it, below `fds`: `"shard_optimizer"`, `"schedules.warmup"`.
        name: of the argument; empty where the key only decides that the function is called, or which.
        note: how the value is changed on the way.
    """

    of: tuple[str, ...]
    name: str = ""
    note: str = ""

    def __str__(self) -> str:
        calls = " or ".join(f"`fds.{f}({self.name + '=' if self.name else '...'})`" for f in self.of)
        return calls + (f": {self.note}" if self.note else "")


@attrs.frozen
class Elsewhere:
    """It is no part of a step: another call of fds takes it."""

    call: str
    note: str = ""

    def __str__(self) -> str:
        return f"`{self.call}`" + (f": {self.note}" if self.note else "")


@attrs.frozen
class NotApplicable:
    """It has no meaning in this design."""

    because: str

    def __str__(self) -> str:
        return f"not applicable: {self.because}"


@attrs.frozen
class NotYet:
    """It asks for a feature that fds does not have yet, unless its value is one of `nothing`, as its default is."""

    feature: str
    nothing: tuple = (None, False)

    def __str__(self) -> str:
        return f"not yet: {self.feature}"


@attrs.frozen
class Part:
    """It matters only where the key `of` of its section asks for the feature."""

    of: str = "enabled"

    def __str__(self) -> str:
        return f"part of `{self.of}`"


Meaning = Argument | Elsewhere | NotApplicable | NotYet | Part


def argument(*of: str, name: str = "", note: str = "") -> Argument:
    """Return the meaning of a key that becomes an argument."""
    return Argument(of, name, note)
