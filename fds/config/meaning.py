"""What a key of DeepSpeed's JSON means in fds: an argument, nothing (and why), or a feature not supported yet."""

from __future__ import annotations

import attrs


@attrs.frozen
class Argument:
    """The key becomes an argument of a transform, an optimizer or a schedule.

    Attributes:
        of: the functions that may take it, below `fds`: `"shard_optimizer"`, `"schedules.warmup"`.
        name: of the argument; empty if the key only decides whether, or which, function is called.
        note: how the value is converted.
    """

    of: tuple[str, ...]
    name: str = ""
    note: str = ""

    def __str__(self) -> str:
        calls = " or ".join(f"`fds.{f}({self.name + '=' if self.name else '...'})`" for f in self.of)
        return calls + (f": {self.note}" if self.note else "")


@attrs.frozen
class Elsewhere:
    """The key is not part of a step: another function of fds takes it."""

    call: str
    note: str = ""

    def __str__(self) -> str:
        return f"`{self.call}`" + (f": {self.note}" if self.note else "")


@attrs.frozen
class NotApplicable:
    """The key has no meaning in fds."""

    because: str

    def __str__(self) -> str:
        return f"not applicable: {self.because}"


@attrs.frozen
class NotYet:
    """The key asks for a feature that fds does not support yet, unless its value is in `nothing`, as the default is."""

    feature: str
    nothing: tuple = (None, False)

    def __str__(self) -> str:
        return f"not yet: {self.feature}"


@attrs.frozen
class PartOf:
    """The key matters only if the key `of` of its section enables the feature."""

    of: str = "enabled"

    def __str__(self) -> str:
        return f"part of `{self.of}`"


Meaning = Argument | Elsewhere | NotApplicable | NotYet | PartOf


def argument(*of: str, name: str = "", note: str = "") -> Argument:
    """Return an `Argument` of these functions."""
    return Argument(of, name, note)
