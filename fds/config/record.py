"""Records: groups of DeepSpeed's JSON as frozen values. A key is a field: its type, default, unit, words and meaning.

A field's name is the key's. What a record was not given it takes from an edition of the defaults, and it remembers
what it was given, so that JSON -> record -> JSON is the identity, but for old spellings.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import re
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Self

import attrs

from fds.config.meaning import Meaning
from fds.config.values import converted, is_union, words
from fds.errors import ConfigError, did_you_mean, is_number

Edition = Literal["0.19.6", "docs"]
EDITIONS: tuple[Edition, ...] = typing.get_args(Edition)
COMMENT = r"^(_|\$schema$)"  # the names of comments, for which JSON has no other place, and of what editors read
AUTO = "auto"  # a value that `resolve` fills in; any number, truth value or word may be this

_ABSENT: Any = attrs.make_class("Absent", [], repr=False, frozen=True)()


def is_comment(name: str) -> bool:
    """Say whether this is the name of a comment, or of the schema that an editor reads the file by.

    >>> [is_comment(name) for name in ("_note", "$schema", "fp16")]
    [True, True, False]
    """
    return re.match(COMMENT, name) is not None


@attrs.frozen
class Key:
    """What is known of a key of the JSON, beside its type.

    Attributes:
        doc: one line.
        meaning: what it does here; None for a group, whose keys say that themselves.
        unit: of its number.
        default: in 0.19.6: its value, or a function that makes one (a record's class).
        documented: the default that DeepSpeed's documentation gives, where it is another.
        low, high: bounds of its number; `over`: what it must exceed; `under`: what must exceed it.
        old: spelling -> what turns its value into that of this key.
        flat: the keys of this group stand beside it in the JSON, not below it.
        null: of a key that the JSON gives as null: True, it is as if it were absent; False, null is refused although
            an absent key is null; None, its type says whether it is taken.
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
        """Return the default of an edition."""
        return self.documented if edition == "docs" and self.differs else self.default

    @property
    def differs(self) -> bool:
        """Whether the editions differ."""
        return self.documented is not _ABSENT


def same(value: Any) -> Any:
    """Return the value: an old spelling is only a name."""
    return value


def key(
    default: Any, doc: str, meaning: Meaning | None = None, *, unit: str = "", documented: Any = _ABSENT,
    low: float | None = None, high: float | None = None, over: float | None = None, under: float | None = None,
    old: Mapping[str, Callable[[Any], Any]] | tuple[str, ...] = (), flat: bool = False, null: bool | None = None,
) -> Any:  # fmt: skip
    """Return the field of a key; see `Key`."""
    spellings = old if isinstance(old, Mapping) else dict.fromkeys(old, same)
    known = Key(doc, meaning, unit, default, documented, low, high, over, under, spellings, flat, null)
    return attrs.field(default=_ABSENT, kw_only=True, metadata={"key": known})


@functools.cache
def keys(cls: type[Config]) -> dict[str, tuple[Any, Key]]:
    """Return name -> (type, what is known) of the keys of a record, in order."""
    hints = typing.get_type_hints(cls)
    return {a.name: (hints[a.name], a.metadata["key"]) for a in attrs.fields(cls) if "key" in a.metadata}


@attrs.frozen
class Config:
    """A group of keys. Made from keywords or from a dict, read by attribute or by item, never changed.

    >>> from fds.config import BatchConfig
    >>> batch = BatchConfig(train_batch_size=32, gradient_accumulation_steps=2)
    >>> batch == BatchConfig.from_dict({"train_batch_size": 32, "gradient_accumulation_steps": 2})
    True
    >>> batch["train_batch_size"], batch.resolve(world_size=4).train_micro_batch_size_per_gpu
    (32, 4)

    Raises `ConfigError` with the JSON path of a key that is unknown, or of a value that it cannot have.
    """

    defaults: Edition = attrs.field(default="0.19.6", kw_only=True, repr=False)
    given: frozenset[str] = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.defaults not in EDITIONS:
            raise ConfigError("there is no such edition of the defaults", where="defaults", got=repr(self.defaults),
                              want=" or ".join(map(repr, EDITIONS)))  # fmt: skip
        given = set()
        for name, (type_, known) in keys(type(self)).items():
            value = getattr(self, name)
            if value is not _ABSENT:
                given.add(name)
            else:
                value = known.of(self.defaults)
            object.__setattr__(self, name, _structured(value, type_, known, name, self.defaults))
        object.__setattr__(self, "given", frozenset(given))
        self.check()

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        cls.__repr__ = _text  # type: ignore[method-assign]  # of hundreds of keys, those that were given

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, defaults: Edition = "0.19.6") -> Self:
        """Return the record of a group of the JSON. Old spellings are taken with a warning that names the new.

        Keys that begin with `_` are comments, and left out.
        """
        if not isinstance(data, Mapping):
            raise ConfigError("a group of keys is a JSON object", got=repr(data)[:80], want=f"{{...}}: {cls.__name__}")
        return cls(**_spelled(cls, data), defaults=defaults)

    def to_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Return the JSON of what was given, or, where `full`, of everything."""
        out: dict[str, Any] = {}
        for name, (_, known) in keys(type(self)).items():
            value = getattr(self, name)
            if known.flat:
                out.update(value.to_dict(full=full))
            elif name in self.given or (full and not (value is None and known.null is False)):
                out[name] = _unstructured(value, full)
        return out

    def check(self) -> None:
        """Raise `ConfigError` for values that contradict each other."""

    def resolve(self, **known: Any) -> Self:
        """Return the record with what can be inferred filled in; `"auto"` becomes the default."""
        return type(self)(**{n: _resolved(v) for n, v in self._given() if v != AUTO}, defaults=self.defaults)

    def is_valid(self, **known: Any) -> bool:
        """Return whether `resolve` of the same arguments succeeds."""
        try:
            self.resolve(**known)
        except ConfigError:
            return False
        return True

    def __getitem__(self, name: str) -> Any:
        """Return the value of a key, or of a path of them: `config["zero_optimization.stage"]`."""
        first, _, rest = name.partition(".")
        for own, (_, known) in keys(type(self)).items():
            if own == first:
                value = getattr(self, own)
                if rest and not isinstance(value, Config):
                    break
                return value[rest] if rest else value
            if known.flat and first in keys(type(getattr(self, own))):
                return getattr(self, own)[name]
        raise KeyError(did_you_mean(name, flat_keys(type(self))))

    def with_keys(self, **changes: Any) -> Self:
        """Return the record with other values for some keys of its own."""
        return type(self)(**{**dict(self._given()), **changes}, defaults=self.defaults)

    def _given(self) -> Iterator[tuple[str, Any]]:
        return ((name, getattr(self, name)) for name in keys(type(self)) if name in self.given)


def _text(config: Config) -> str:
    return f"{type(config).__name__}.from_dict({config.to_dict()!r})"


@functools.cache
def flat_keys(cls: type[Config]) -> dict[str, tuple[Any, Key]]:
    """Return the keys that stand in a record's own JSON object, those of flat groups with them."""
    out = {}
    for name, (type_, known) in keys(cls).items():
        out.update(keys(type_) if known.flat else {name: (type_, known)})
    return out


@functools.cache
def record_of(type_: Any) -> type[Config] | None:
    """Return the record that values of a type are, if they are one: of `ZeroConfig | None`, `ZeroConfig`."""
    options = typing.get_args(type_) if is_union(type_) else (type_,)
    found = [one for one in options if isinstance(one, type) and issubclass(one, Config)]
    return found[0] if found else None


def walk(config: Config, path: str = "") -> Iterator[tuple[str, Any, Key, bool]]:
    """Yield (JSON path, value, what is known, whether it was given) of all keys, groups before their keys."""
    for name, (_, known) in keys(type(config)).items():
        value = getattr(config, name)
        here = path if known.flat else f"{path}{name}"
        if not known.flat:
            yield here, value, known, name in config.given
        if isinstance(value, Config):
            yield from walk(value, here if known.flat else f"{here}.")


def _spelled(cls: type[Config], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a record, with the keys of flat groups below their group and old spellings made new."""
    places = {name: (group, known) for group, (type_, known) in keys(cls).items()
              for name in (keys(type_) if known.flat else (group,))}  # fmt: skip
    old = {spelling: (name, known, turn) for name, (_, known) in flat_keys(cls).items()
           for spelling, turn in known.old.items()}  # fmt: skip
    out: dict[str, Any] = {}
    for spelling, value in data.items():
        if not isinstance(spelling, str):
            raise ConfigError("a key is a string", where=repr(spelling), got=repr(spelling), want="a string")
        if is_comment(spelling):
            continue
        name = spelling
        if spelling in old and spelling not in places:
            name, _, turn = old[spelling]
            with within(f"{spelling}."):
                value = value if value == AUTO else turn(value)
            warnings.warn(f"{spelling!r} is an old spelling: write {name!r}", FutureWarning, stacklevel=4)
            others = [other for other in data if other != spelling and name in (other, *old.get(other, ())[:1])]
            if others:
                raise ConfigError("a key is given in two spellings", where=f"{spelling}, {others[0]}",
                                  got=f"{spelling!r} and {others[0]!r}", want=repr(name))  # fmt: skip
        if name not in places:
            raise _unknown(name, [*places, *old])
        group, known = places[name]
        if value is None and known.null is not None:
            if not known.null:
                raise ConfigError("a value of a wrong type", where=spelling, got="None",
                                  want=words(keys(cls)[group][0], null=False), hint="or leave the key out")  # fmt: skip
            continue
        if known.flat:
            out.setdefault(group, {})[name] = value
        else:
            out[group] = value
    return out


def _unknown(name: Any, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError("there is no such key", where=str(name), got=repr(name), want="a key that is known here",
                       hint=f'{hint}Or leave it out with a warning: unknown="warn"')  # fmt: skip


def _structured(value: Any, type_: Any, known: Key, name: str, edition: Edition) -> Any:
    """Return the value of a key as its type. Raises `ConfigError` with its path."""
    record = record_of(type_)
    if value is known.default and callable(value):
        return record(defaults=edition) if record else value()
    if record is not None and value is not None:
        with within("" if known.flat else f"{name}."):
            return _record(value, record, edition)
    of = typing.get_args(type_)
    if typing.get_origin(type_) is dict and isinstance(of[1], type) and issubclass(of[1], Config):
        if not isinstance(value, Mapping):
            raise ConfigError("a value of a wrong type", where=name, got=repr(value)[:80], want="an object of objects")
        return {one: _named(f"{name}.{one}.", inner, of[1], edition) for one, inner in value.items()}
    if isinstance(value, str) and value == AUTO:
        return value
    try:
        value = converted(value, type_)
    except TypeError:
        raise ConfigError("a value of a wrong type", where=name, got=repr(value)[:80], want=words(type_)) from None
    _refuse_bounds(value, known, name)
    return value


@contextlib.contextmanager
def within(prefix: str) -> Iterator[None]:
    """Put a path before that of a `ConfigError`: `"params."` before `"lr"`."""
    try:
        yield
    except ConfigError as error:
        raise _at(prefix, error) from error


def _at(prefix: str, error: ConfigError) -> ConfigError:
    where = ", ".join(prefix + path for path in error.where.split(", ")) if error.where else prefix.rstrip(".")
    return type(error)(error.what, where=where, got=error.got, want=error.want, hint=error.hint)


def _record(value: Any, record: type[Config], edition: Edition) -> Config:
    if not isinstance(value, record):
        return record.from_dict(value, defaults=edition)
    return value if value.defaults == edition else type(value)(**dict(value._given()), defaults=edition)


def _named(prefix: str, value: Any, record: type[Config], edition: Edition) -> Config:
    with within(prefix):
        return _record(value, record, edition)


def _refuse_bounds(value: Any, known: Key, name: str) -> None:
    if not is_number(value):
        return
    if not math.isfinite(value) and known.high != math.inf:
        raise ConfigError("a number is finite", where=name, got=repr(value), want="a number")
    for bound, holds, said in (
        (known.low, lambda b: value >= b, "at least"), (known.high, lambda b: value <= b, "at most"),
        (known.over, lambda b: value > b, "more than"), (known.under, lambda b: value < b, "less than"),
    ):  # fmt: skip
        if bound is not None and not holds(bound):
            raise ConfigError("a number out of range", where=name, got=repr(value), want=f"{said} {bound:g}")


def _resolved(value: Any) -> Any:
    return value.resolve() if isinstance(value, Config) else value


def _unstructured(value: Any, full: bool) -> Any:
    if isinstance(value, Config):
        return value.to_dict(full=full)
    if isinstance(value, Mapping):
        return {name: _unstructured(one, full) for name, one in value.items()}
    return [_unstructured(one, full) for one in value] if isinstance(value, tuple | list) else value
