"""`unknown="warn"`: leave unknown keys out of a JSON, each with a warning."""

from __future__ import annotations

import difflib
import typing
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from fds.config.field import flat_keys, is_comment
from fds.config.keys import optimizer, scheduler
from fds.config.record import Config, record_of
from fds.errors import ConfigError

Unknown = Literal["error", "warn"]


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


def _known(cls: type[Config], data: Any, path: str) -> Any:
    if not isinstance(data, Mapping):
        return data
    types = {spelling: type_ for name, (type_, key) in flat_keys(cls).items() for spelling in (*key.old, name)}
    if path == "":
        types["allgather_size"] = int  # used with the oldest spelling of zero_optimization, true or false
    out = {}
    for name, value in data.items():
        if name in types:
            out[name] = _value(types[name], value, f"{path}{name}", _parameters(cls, data))
        elif not is_comment(str(name)):
            near = difflib.get_close_matches(str(name), types, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            warnings.warn(f"{path}{name} is not known and is left out{hint}", UserWarning, stacklevel=_depth(path) + 4)
    return out


def _value(type_: Any, value: Any, path: str, parameters: type[Config] | None) -> Any:
    """Return the value of a key without unknown keys below it."""
    if parameters is not None and path.endswith(".params"):
        return _known(parameters, value, f"{path}.")
    if (record := record_of(type_)) is not None:
        return _known(record, value, f"{path}.")
    of = typing.get_args(type_)
    named = typing.get_origin(type_) is dict and isinstance(of[1], type) and issubclass(of[1], Config)
    if named and isinstance(value, Mapping):
        return {name: _known(of[1], one, f"{path}.{name}.") for name, one in value.items()}
    return value


def _parameters(cls: type[Config], data: Mapping[str, Any]) -> type[Config] | None:
    """Return the record of the parameters of an optimizer or scheduler, or None if its type is not known."""
    type_ = data.get("type")
    if cls is optimizer.OptimizerConfig and isinstance(type_, str):
        return optimizer.PARAMETERS.get(optimizer.kind_of(type_))
    return scheduler.PARAMETERS.get(str(type_)) if cls is scheduler.SchedulerConfig else None


def _depth(path: str) -> int:
    return 2 * path.count(".")
