"""Records: the base class of the groups of DeepSpeed's JSON, whose fields are the keys.

Absent keys take the default of an edition. A record remembers which keys it was given, so that JSON -> record -> JSON
is the identity, except for old spellings.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import attrs
import cattrs

from fds.config.field import ABSENT, AUTO, EDITIONS, Edition, Key, flat_keys, is_comment, keys
from fds.errors import ConfigError, did_you_mean, is_number, nearest


class UnknownKeyError(ConfigError):
    """Refuse a key that nobody knows; `where` has its path."""


@attrs.frozen(slots=False)
class Config:
    """A group of keys: constructed from keywords or a dict, read by attribute or item, immutable.

    >>> from fds.config import BatchConfig
    >>> batch = BatchConfig(train_batch_size=32, gradient_accumulation_steps=2)
    >>> batch == BatchConfig.from_dict({"train_batch_size": 32, "gradient_accumulation_steps": 2})
    True
    >>> batch["train_batch_size"], batch.resolve(world_size=4).train_micro_batch_size_per_gpu
    (32, 4)

    Raises `ConfigError` with the JSON path of an unknown key or an invalid value.
    """

    defaults: Edition = attrs.field(default="0.19.6", kw_only=True, repr=False)
    given: frozenset[str] = attrs.field(init=False, eq=False, repr=False)
    checks: ClassVar[tuple[tuple[Callable[..., None], Sequence[str], str], ...]] = ()  # the keys it is of, its switch

    if TYPE_CHECKING:  # the fields of most records are rows of a table

        def __init__(self, *, defaults: Edition = "0.19.6", **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __attrs_post_init__(self) -> None:
        if self.defaults not in EDITIONS:
            raise ConfigError(
                "there is no such edition of the defaults",
                where="defaults",
                got=repr(self.defaults),
                want=" or ".join(map(repr, EDITIONS)),
            )
        names = set()
        for name, (type_, key) in keys(type(self)).items():
            value = getattr(self, name)
            if value is not ABSENT:
                names.add(name)
            else:
                value = key.of(self.defaults)
            object.__setattr__(self, name, _structure(value, type_, key, name, self.defaults))
        object.__setattr__(self, "given", frozenset(names))
        self.check()

    @classmethod
    def __attrs_init_subclass__(cls) -> None:
        cls.__repr__ = _text  # type: ignore[method-assign]  # shows only the keys that were given

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, defaults: Edition = "0.19.6") -> Self:
        """Return the record of a group of the JSON.

        Old spellings are accepted with a warning that names the new one. Keys that begin with `_` are comments and
        ignored.

        Args:
            data: the JSON object of the group.
            defaults: the version of DeepSpeed whose defaults stand for missing keys, or "docs" for those of its
                documentation.

        Raises `ConfigError` for a key that is unknown, with the nearest one that is known, and for a wrong value.
        """
        if not isinstance(data, Mapping):
            raise ConfigError("a group of keys is a JSON object", got=repr(data)[:80], want=f"{{...}}: {cls.__name__}")
        return cls(**_arguments(cls, data), defaults=defaults)

    def to_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Return the JSON of the keys that were given, or of all keys if `full`."""
        out: dict[str, Any] = {}
        for name, (_, key) in keys(type(self)).items():
            value = getattr(self, name)
            if key.flat:
                out.update(value.to_dict(full=full))
            elif name in self.given or (full and not (value is None and key.null is False)):
                out[name] = _unstructure(value, full)
        return out

    def check(self) -> None:
        """Raise `ConfigError` for values that contradict each other."""
        for check, paths, switch in self.checks:
            if not switch or self[switch] is True:
                check(self, *paths)

    def resolve(self, **arguments: Any) -> Self:
        """Return the record with inferred values filled in; `"auto"` becomes the default."""
        return type(self)(**{n: _resolve(v) for n, v in self._given_items() if v != AUTO}, defaults=self.defaults)

    def is_valid(self, **arguments: Any) -> bool:
        """Return whether `resolve` with the same arguments succeeds."""
        try:
            self.resolve(**arguments)
        except ConfigError:
            return False
        return True

    def __getitem__(self, name: str) -> Any:
        """Return the value at a key or a path: `config["zero_optimization.stage"]`."""
        first, _, rest = name.partition(".")
        for field, (_, key) in keys(type(self)).items():
            value = getattr(self, field)
            if field == first:
                if rest and not isinstance(value, Config):
                    break
                return value[rest] if rest else value
            if key.flat and first in keys(type(value)):
                return value[name]
        raise KeyError(did_you_mean(name, flat_keys(type(self))))

    def with_keys(self, **changes: Any) -> Self:
        """Return a copy with other values for some of its own keys."""
        return type(self)(**{**dict(self._given_items()), **changes}, defaults=self.defaults)

    def _given_items(self) -> Iterator[tuple[str, Any]]:
        return ((name, getattr(self, name)) for name in keys(type(self)) if name in self.given)


def _text(config: Config) -> str:
    return f"{type(config).__name__}.from_dict({config.to_dict()!r})"


@functools.cache
def record_of(type_: Any) -> type[Config] | None:
    """Return the record class in a type, or None if there is none: `ZeroConfig` for `ZeroConfig | None`."""
    options = typing.get_args(type_) if is_union(type_) else (type_,)
    records = [option for option in options if isinstance(option, type) and issubclass(option, Config)]
    return records[0] if records else None


def walk(config: Config, path: str = "") -> Iterator[tuple[str, Any, Key, bool]]:
    """Yield (JSON path, value, key, whether it was given) of all keys, groups before their keys."""
    for name, (_, key) in keys(type(config)).items():
        value = getattr(config, name)
        here = path if key.flat else f"{path}{name}"
        if not key.flat:
            yield here, value, key, name in config.given
        if isinstance(value, Config):
            yield from walk(value, here if key.flat else f"{here}.")


def _arguments(cls: type[Config], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a record: keys of flat groups nested in their group, old spellings replaced."""
    fields = {
        name: (field, key)
        for field, (type_, key) in keys(cls).items()
        for name in (keys(type_) if key.flat else (field,))
    }
    old = {
        spelling: (name, conversion)
        for name, (_, key) in flat_keys(cls).items()
        for spelling, conversion in key.old.items()
    }
    out: dict[str, Any] = {}
    for spelling, value in data.items():
        if not isinstance(spelling, str):
            raise ConfigError("a key is a string", where=repr(spelling), got=repr(spelling), want="a string")
        if is_comment(spelling):
            continue
        name = spelling
        if spelling in old and spelling not in fields:
            name, conversion = old[spelling]
            with within(f"{spelling}."):
                value = value if value == AUTO else conversion(value)
            warnings.warn(f"{spelling!r} is an old spelling: write {name!r}", FutureWarning, stacklevel=4)
            others = [other for other in data if other != spelling and name in (other, *old.get(other, ())[:1])]
            if others:
                raise ConfigError(
                    "a key is given in two spellings",
                    where=f"{spelling}, {others[0]}",
                    got=f"{spelling!r} and {others[0]!r}",
                    want=repr(name),
                )
        if name not in fields:
            raise _unknown(name, [*fields, *old])
        field, key = fields[name]
        if value is None and key.null is not None:
            if not key.null:
                want = describe_type(keys(cls)[field][0], null=False)
                raise ConfigError(
                    "a value has the wrong type", where=spelling, got="None", want=want, hint="or leave the key out"
                )
            continue
        if key.flat:
            out.setdefault(field, {})[name] = value
        else:
            out[field] = value
    return out


def _unknown(name: str, names: list[str]) -> UnknownKeyError:
    return UnknownKeyError(
        "there is no such key", where=name, got=repr(name), want="a known key", hint=nearest(name, names)
    )


def _structure(value: Any, type_: Any, key: Key, name: str, edition: Edition) -> Any:
    record = record_of(type_)
    if value is key.default and callable(value):
        return record(defaults=edition) if record else value()
    if record is not None and value is not None:
        with within("" if key.flat else f"{name}."):
            return _record(value, record, edition)
    of = typing.get_args(type_)
    if typing.get_origin(type_) is dict and isinstance(of[1], type) and issubclass(of[1], Config):
        if not isinstance(value, Mapping):
            raise ConfigError(
                "a value has the wrong type", where=name, got=repr(value)[:80], want="an object of objects"
            )
        return {
            group_name: _record_at(f"{name}.{group_name}.", group, of[1], edition)
            for group_name, group in value.items()
        }
    if isinstance(value, str) and value == AUTO:
        return value
    if isinstance(value, int) and value.bit_length() > 63:  # a float, and the text of the number, may not exist
        got = f"a number of {value.bit_length()} bits"
        raise ConfigError("a number is out of range", where=name, got=got, want="at most 63 bits")
    try:
        value = convert(value, type_)
    except TypeError:
        raise ConfigError(
            "a value has the wrong type", where=name, got=repr(value)[:80], want=describe_type(type_)
        ) from None
    _check_bounds(value, key, name)
    return value


@contextlib.contextmanager
def within(prefix: str) -> Iterator[None]:
    """Prefix the paths in a `ConfigError`: `"params."` before `"lr"`."""
    try:
        yield
    except ConfigError as error:
        raise _prefixed(prefix, error) from error


def _prefixed(prefix: str, error: ConfigError) -> ConfigError:
    where = ", ".join(prefix + path for path in error.where.split(", ")) if error.where else prefix.rstrip(".")
    return type(error)(error.what, where=where, got=error.got, want=error.want, hint=error.hint)


def _record(value: Any, record: type[Config], edition: Edition) -> Config:
    if not isinstance(value, record):
        return record.from_dict(value, defaults=edition)
    return value if value.defaults == edition else type(value)(**dict(value._given_items()), defaults=edition)


def _record_at(prefix: str, value: Any, record: type[Config], edition: Edition) -> Config:
    with within(prefix):
        return _record(value, record, edition)


def _check_bounds(value: Any, key: Key, name: str) -> None:
    if not is_number(value):
        return
    if not math.isfinite(value) and key.high != math.inf:
        raise ConfigError("a number must be finite", where=name, got=repr(value), want="a number")
    for bound, holds, relation in (
        (key.low, lambda b: value >= b, "at least"),
        (key.high, lambda b: value <= b, "at most"),
        (key.over, lambda b: value > b, "more than"),
        (key.under, lambda b: value < b, "less than"),
    ):
        if bound is not None and not holds(bound):
            raise ConfigError("a number is out of range", where=name, got=repr(value), want=f"{relation} {bound:g}")


def _resolve(value: Any) -> Any:
    return value.resolve() if isinstance(value, Config) else value


def _unstructure(value: Any, full: bool) -> Any:
    if isinstance(value, Config):
        return value.to_dict(full=full)
    if isinstance(value, Mapping):
        return {name: _unstructure(item, full) for name, item in value.items()}
    return [_unstructure(item, full) for item in value] if isinstance(value, tuple | list) else value


def convert(value: Any, type_: Any) -> Any:
    """Convert a JSON value to a type: a list to a tuple, 5e8 to an int. Raises `TypeError`."""
    try:
        return _converter.structure(value, type_)
    except _CONVERSION_ERRORS:
        raise TypeError(value) from None


def is_union(type_: Any) -> bool:
    """Return whether a type is a union."""
    return typing.get_origin(type_) in (types.UnionType, typing.Union)


def describe_type(type_: Any, *, null: bool = True) -> str:
    """Return a type in words, for error messages; without null if that is not accepted."""
    if is_union(type_):
        return " or ".join(
            describe_type(option) for option in typing.get_args(type_) if null or option is not types.NoneType
        )
    if typing.get_origin(type_) is Literal:
        return " or ".join(map(repr, typing.get_args(type_)))
    if typing.get_origin(type_) is tuple:
        of = typing.get_args(type_)
        return f"a list of {'' if of[-1] is Ellipsis else f'{len(of)} x '}{describe_type(of[0])}"
    if attrs.has(type_):
        return "an object"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", types.NoneType: "null"}
    return names.get(type_, "an object" if typing.get_origin(type_) is dict else str(type_))


def _check(valid: bool, value: Any) -> Any:
    if not valid:
        raise TypeError(value)
    return value


def _literal(value: Any, type_: Any) -> Any:
    options = typing.get_args(type_)
    equal = [option for option in options if option == value and isinstance(option, bool) == isinstance(value, bool)]
    return _check(bool(equal), equal)[0]


_CONVERSION_ERRORS = (ValueError, TypeError, OverflowError, cattrs.BaseValidationError)
_converter = cattrs.Converter()
_converter.register_structure_hook(bool, lambda v, _: _check(isinstance(v, bool), v))
_converter.register_structure_hook(str, lambda v, _: _check(isinstance(v, str), v))
_converter.register_structure_hook(float, lambda v, _: _check(is_number(v) and abs(float(v)) >= 0, v))
_converter.register_structure_hook(int, lambda v, _: int(_check(is_number(v) and int(v) == v, v)))


def _union(value: Any, type_: Any) -> Any:
    for option in typing.get_args(type_):
        if option is types.NoneType:
            if value is None:
                return None
            continue
        try:
            return _converter.structure(value, option)
        except _CONVERSION_ERRORS:
            continue
    raise TypeError(value)


def _tuple(value: Sequence[Any], types_: tuple) -> tuple:
    if types_[-1] is not Ellipsis:
        _check(len(value) == len(types_), value)
    return tuple(_converter.structure(x, types_[0]) for x in value)


def _dict(value: Any, type_: Any) -> dict[str, Any]:
    of = typing.get_args(type_)[1]
    return {
        _converter.structure(name, str): copy.deepcopy(x) if of is Any else _converter.structure(x, of)
        for name, x in _check(isinstance(value, Mapping), value).items()
    }


_converter.register_structure_hook_func(is_union, _union)
_converter.register_structure_hook_func(lambda t: typing.get_origin(t) is Literal, _literal)
_converter.register_structure_hook_func(lambda t: typing.get_origin(t) is dict, _dict)
_converter.register_structure_hook_func(
    lambda t: typing.get_origin(t) is tuple,
    lambda v, t: _tuple(_check(isinstance(v, list | tuple), v), typing.get_args(t)),
)
