"""Groups of modules to which a compression technique applies, and the keys that all such groups have.

Source: `compression/config.py` of DeepSpeed 0.19.6.
"""

from __future__ import annotations

from typing import Any

import attrs

from fds.config.contradiction import MissingKeyError, check_needed
from fds.config.field import key
from fds.config.meaning import PartOf
from fds.config.record import Config

SHARED = PartOf("shared_parameters.enabled")


def schedule_offset_key(default: int, *, documented: int) -> Any:
    """Return the field of `schedule_offset`."""
    doc, of = "calls of the step before it begins", PartOf()
    if default == documented:
        return key(default, doc, of, unit="steps", low=0)
    return key(default, doc, of, unit="steps", documented=documented, low=0)


@attrs.frozen
class ModuleGroupConfig(Config):
    """The modules of a group."""

    modules: tuple[str, ...] | str = key("*", "regular expressions for names of modules; *: all that can be", SHARED)
    related_modules: tuple[tuple[str, ...], ...] | None = key(
        None, "for each of `modules`, those that lose inputs where it loses outputs", SHARED
    )


def check_groups(config: Config, *needed: str) -> None:
    """Raise `ConfigError` if a technique is enabled and has no group, or a group lacks a required parameter."""
    check_needed(config, "shared_parameters.enabled", "different_groups")
    for name in config["different_groups"] if config["shared_parameters.enabled"] is True else ():
        paths = [f"different_groups.{name}.params.{one}" for one in needed]
        absent = [
            path
            for path, one in zip(paths, needed, strict=True)
            if config["different_groups"][name]["params"][one] is None
        ]
        if absent:
            raise MissingKeyError(
                "a group lacks a parameter that its technique needs",
                got="true, and null",
                where=", ".join(["shared_parameters.enabled", *absent]),
                want=" and ".join(absent),
            )
