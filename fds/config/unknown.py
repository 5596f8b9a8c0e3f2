"""`unknown="warn"`: leave unknown keys out of a JSON, each with a warning.

Keys of `optimizer.params` and `scheduler.params` are never left out: without `maximize` a run would minimise.
"""

from __future__ import annotations

import typing
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from fds.config.field import flat_keys, is_comment
from fds.config.record import Config, UnknownKeyError, record_of
from fds.errors import ConfigError, nearest

Unknown = Literal["error", "warn"]
_NEVER_LEFT_OUT = ("optimizer.params.", "scheduler.params.")


def with_known_keys(cls: type[Config], data: Mapping[str, Any], unknown: Unknown) -> Mapping[str, Any]:
    """Return the JSON of a record, for `"warn"` without unknown keys at any depth.

    Raises `ConfigError` if `unknown` is neither `"error"` nor `"warn"`.
    """
    if unknown not in typing.get_args(Unknown):
        raise ConfigError(
            "not a way to treat unknown keys",
            where="unknown",
            got=repr(unknown),
            want=" or ".join(map(repr, typing.get_args(Unknown))),
        )
    return data if unknown == "error" else _known(cls, data, "")


def naming_the_option(error: UnknownKeyError) -> ConfigError:
    """Return the error, with a hint at `unknown="warn"` where that would leave the key out."""
    hint = error.hint
    if not error.where.startswith(_NEVER_LEFT_OUT):
        hint = f"{hint} Or leave" if hint else "leave"
        hint += ' it out with a warning: unknown="warn"'
    return ConfigError(error.what, where=error.where, got=error.got, want=error.want, hint=hint)


def _known(cls: type[Config], data: Any, path: str) -> Any:
    if not isinstance(data, Mapping):
        return data
    types = {spelling: type_ for name, (type_, key) in flat_keys(cls).items() for spelling in (*key.old, name)}
    if path == "":
        types["allgather_size"] = int  # used with the oldest spelling of zero_optimization, true or false
    out = {}
    for name, value in data.items():
        if name in types:
            out[name] = _value(types[name], value, f"{path}{name}")
        elif not is_comment(str(name)):
            near = nearest(str(name), types)
            hint = f" ({near})" if near else ""
            warnings.warn(f"{path}{name} is not known and is left out{hint}", UserWarning, stacklevel=_depth(path) + 4)
    return out


def _value(type_: Any, value: Any, path: str) -> Any:
    """Return the value of a key without unknown keys below it."""
    if (record := record_of(type_)) is not None:
        return _known(record, value, f"{path}.")
    of = typing.get_args(type_)
    named = typing.get_origin(type_) is dict and isinstance(of[1], type) and issubclass(of[1], Config)
    if named and isinstance(value, Mapping):
        return {name: _known(of[1], one, f"{path}.{name}.") for name, one in value.items()}
    return value


def _depth(path: str) -> int:
    return 2 * path.count(".")
