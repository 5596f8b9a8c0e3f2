"""A key of DeepSpeed's JSON as a field of a record: its type, default, unit, bounds, and what it means in fds."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs

Edition = Literal["0.19.6", "docs"]
EDITIONS: tuple[Edition, ...] = typing.get_args(Edition)
COMMENT = r"^(_|\$schema$)"  # names that are ignored: comments, which JSON does not have, and the schema for editors
AUTO = "auto"  # filled in by `resolve`; allowed in place of any number, boolean or string

ABSENT: Any = attrs.make_class("Absent", [], repr=False, frozen=True)()


def is_comment(name: str) -> bool:
    """Return whether a key is a comment, or names the schema for editors.

    >>> [is_comment(name) for name in ("_note", "$schema", "fp16")]
    [True, True, False]
    """
    return re.match(COMMENT, name) is not None


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


@attrs.frozen
class Key:
    """The description of a key of the JSON; its type is the field's annotation.

    Attributes:
        doc: a one-line description.
        meaning: what the key does in fds; None for a group, whose keys have their own.
        unit: of its number.
        default: in 0.19.6: a value, or a function that returns one (a record's class).
        documented: the default in DeepSpeed's documentation, where it differs.
        low, high: inclusive bounds of a number.
        over, under: exclusive bounds of a number.
        old: old spelling -> function from its value to this key's value.
        flat: the keys of this group are in the JSON object of its parent, not in one of their own.
        null: how null in the JSON is treated: True, like an absent key; False, refused, although the value of an absent
            key is None; None, as its type says.
    """

    doc: str
    meaning: Meaning | None
    unit: str
    default: Any
    documented: Any
    low: float | None
    high: float | None
    over: float | None
    under: float | None
    old: Mapping[str, Callable[[Any], Any]]
    flat: bool
    null: bool | None

    def of(self, edition: Edition) -> Any:
        """Return the default in an edition."""
        return self.documented if edition == "docs" and self.differs else self.default

    @property
    def differs(self) -> bool:
        """Whether the two editions have different defaults."""
        return self.documented is not ABSENT


def same(value: Any) -> Any:
    """Return the value unchanged: the conversion of an old spelling that only renames a key."""
    return value


def key(
    default: Any,
    doc: str,
    meaning: Meaning | None = None,
    *,
    unit: str = "",
    documented: Any = ABSENT,
    low: float | None = None,
    high: float | None = None,
    over: float | None = None,
    under: float | None = None,
    old: Mapping[str, Callable[[Any], Any]] | tuple[str, ...] = (),
    flat: bool = False,
    null: bool | None = None,
    type: Any = None,
) -> Any:
    """Return the attrs field of a key; the arguments are described in `Key`, `type` is for one without annotation."""
    spellings = old if isinstance(old, Mapping) else dict.fromkeys(old, same)
    key_ = Key(doc, meaning, unit, default, documented, low, high, over, under, spellings, flat, null)
    return attrs.field(default=ABSENT, kw_only=True, type=type, metadata={"key": key_})


@functools.cache
def keys(cls: type) -> dict[str, tuple[Any, Key]]:
    """Return name -> (type, key) of the fields of a record that are keys, in order."""
    hints = typing.get_type_hints(cls)  # of a record of somebody's own; a row of a table has its type in the field
    return {a.name: (hints.get(a.name, a.type), a.metadata["key"]) for a in attrs.fields(cls) if "key" in a.metadata}


@functools.cache
def flat_keys(cls: type) -> dict[str, tuple[Any, Key]]:
    """Return name -> (type, key) of everything in a record's JSON object, including the keys of flat groups."""
    out = {}
    for name, (type_, key_) in keys(cls).items():
        out.update(keys(type_) if key_.flat else {name: (type_, key_)})
    return out
