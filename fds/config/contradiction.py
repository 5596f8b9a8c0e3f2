"""Checks of several keys of one record, with errors that show all the keys involved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fds.errors import ConfigError, is_number

if TYPE_CHECKING:
    from fds.config.record import Config


class MissingKeyError(ConfigError):
    """Refuse a configuration without a key that it needs; `where` has the path of the key."""


def contradiction(config: Config, what: str, *paths: str, want: str) -> ConfigError:
    """Return an error that shows the paths, below a record, and the values of keys that contradict each other."""
    got = ", ".join(f"{path}={_at(config, path)!r}" for path in paths)
    return ConfigError(what, where=", ".join(paths), got=got, want=want)


def check_order(config: Config, low: str, high: str) -> None:
    """Raise `ConfigError` if both keys are numbers and the first is larger."""
    least, most = config[low], config[high]
    if is_number(least) and is_number(most) and least > most:
        raise contradiction(config, "the lower bound is above the upper", low, high, want=f"{low} <= {high}")


def check_length(config: Config, count: str, listed: str) -> None:
    """Raise `ConfigError` if a key is not the length of the list in another."""
    number, items = config[count], config[listed]
    if is_number(number) and isinstance(items, tuple) and number != len(items):
        raise contradiction(config, "the list has the wrong length", count, listed, want=f"{count} = len({listed})")


def check_needed(config: Config, switch: str, *needed: str) -> None:
    """Raise `ConfigError` if a switch is on and a key that it needs is null or empty."""
    absent = [path for path in needed if _at(config, path) in (None, (), {})]
    if config[switch] is True and absent:
        error = contradiction(
            config,
            "a feature is enabled without the keys that it needs",
            switch,
            *absent,
            want=f"{' and '.join(absent)} where {switch} is true",
        )
        raise MissingKeyError(error.what, where=error.where, got=error.got, want=error.want)


def _at(config: Config, path: str) -> Any:
    """Return the value at a path, which may contain names of groups: `different_groups.wq1.params.start_bits`."""
    value: Any = config
    for name in path.split("."):
        value = value[name]
    return value
