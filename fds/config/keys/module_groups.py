"""Groups of modules that a technique of compression is for: which modules, and what all techniques' groups have.

Source: reference/003; `compression/config.py` of 0.19.6.
"""

from __future__ import annotations

from typing import Any

import attrs

from fds.config.contradiction import refuse_absence
from fds.config.meaning import Part
from fds.config.record import Config, key
from fds.errors import ConfigError

SHARED = Part("shared_parameters.enabled")


def start(default: int, *, documented: int) -> Any:
    """Return the field of `schedule_offset`."""
    doc, of = "calls of the step before it begins", Part()
    if default == documented:
        return key(default, doc, of, unit="steps", low=0)
    return key(default, doc, of, unit="steps", documented=documented, low=0)


@attrs.frozen
class ModuleGroupConfig(Config):
    """Which modules a group is of."""

    modules: tuple[str, ...] | str = key("*", "regular expressions for names of modules; *: all that can be", SHARED)
    related_modules: tuple[tuple[str, ...], ...] | None = key(
        None, "for each of `modules`, those that lose inputs where it loses outputs", SHARED)


def refuse_bare_groups(config: Config, *needed: str) -> None:
    """Raise `ConfigError` where a technique is on and has no group, or a group lacks a parameter that it needs."""
    refuse_absence(config, "shared_parameters.enabled", "different_groups")
    for name in config["different_groups"] if config["shared_parameters.enabled"] is True else ():
        paths = [f"different_groups.{name}.params.{one}" for one in needed]
        absent = [path for path, one in zip(paths, needed, strict=True)
                  if config["different_groups"][name]["params"][one] is None]  # fmt: skip
        if absent:
            raise ConfigError("a group lacks what its technique needs", got="true, and null",
                              where=", ".join(["shared_parameters.enabled", *absent]), want=" and ".join(absent))
