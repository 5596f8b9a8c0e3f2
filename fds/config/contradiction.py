"""Keys of one record that contradict each other, refused with the names and values of all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fds.errors import ConfigError, is_number

if TYPE_CHECKING:
    from fds.config.record import Config


def contradiction(config: Config, what: str, *paths: str, want: str) -> ConfigError:
    """Return the error that names keys of a record, by their paths below it, with what they are."""
    got = ", ".join(f"{path}={_at(config, path)!r}" for path in paths)
    return ConfigError(what, where=", ".join(paths), got=got, want=want)


def refuse_disorder(config: Config, low: str, high: str) -> None:
    """Raise `ConfigError` where both keys are numbers and the first is the larger."""
    least, most = config[low], config[high]
    if is_number(least) and is_number(most) and least > most:
        raise contradiction(config, "the lower bound is above the upper", low, high, want=f"{low} <= {high}")


def refuse_miscount(config: Config, count: str, listed: str) -> None:
    """Raise `ConfigError` where the number is not that of what is listed."""
    number, items = config[count], config[listed]
    if is_number(number) and isinstance(items, tuple) and number != len(items):
        raise contradiction(config, "the list has another length", count, listed, want=f"{count} = len({listed})")


def refuse_absence(config: Config, switch: str, *needed: str) -> None:
    """Raise `ConfigError` where the switch is on and a key that it cannot do without is null, or empty."""
    absent = [path for path in needed if _at(config, path) in (None, (), {})]
    if config[switch] is True and absent:
        raise contradiction(config, "a feature is asked for without what it needs", switch, *absent,
                            want=f"{' and '.join(absent)} where {switch} is true")




def _at(config: Config, path: str) -> Any:
    """Return the value of a path, which may go through groups by name: `different_groups.wq1.params.start_bits`."""
    value: Any = config
    for name in path.split("."):
        value = value[name]
    return value
