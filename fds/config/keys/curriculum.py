"""Curriculum learning: easy samples first, by a schedule of the maximum difficulty.

`CurriculumConfig` is the legacy section, which shortens sequences; data efficiency has a curriculum by metrics, with
the same schedules. Required keys of a schedule have no default in 0.19.6; here it is null.

Source: `runtime/data_pipeline/curriculum_scheduler.py` of DeepSpeed 0.19.6.
"""

from __future__ import annotations

from typing import Literal

import attrs

from fds.config.contradiction import check_needed, check_order, contradiction
from fds.config.field import key
from fds.config.meaning import NotYet, PartOf
from fds.config.record import Config

ScheduleType = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]
ENABLED = PartOf("curriculum_learning.enabled")

_REQUIRED = {  # in 0.19.6; `custom` is a function of the program
    "fixed_linear": ("schedule_config.total_curriculum_step", "schedule_config.difficulty_step"),
    "fixed_root": (
        "schedule_config.total_curriculum_step",
        "schedule_config.difficulty_step",
        "schedule_config.root_degree",
    ),
    "fixed_discrete": ("schedule_config.difficulty", "schedule_config.max_step"),
}


@attrs.frozen
class CurriculumScheduleConfig(Config):
    """How the difficulty grows with the step; which keys are used depends on `schedule_type`."""

    total_curriculum_step: int | None = key(
        None, "when the greatest difficulty is reached: fixed_linear, fixed_root", ENABLED, unit="steps", over=0
    )
    difficulty_step: int | None = key(
        None, "difficulties are rounded down to multiples of this: fixed_linear, fixed_root", ENABLED, over=0
    )
    root_degree: int | None = key(
        None, "2 grows like the square root, 3 like the cube root, 1 linearly: fixed_root", ENABLED, over=0
    )
    difficulty: tuple[int, ...] | None = key(None, "one difficulty for each stretch of steps: fixed_discrete", ENABLED)
    max_step: tuple[int, ...] | None = key(
        None, "last step of each stretch but the last, which has no end: fixed_discrete", ENABLED, unit="steps"
    )

    def check(self) -> None:
        """Raise `ConfigError` if the intervals of steps and their ends do not match."""
        levels, ends = self.difficulty, self.max_step
        if isinstance(levels, tuple) and isinstance(ends, tuple) and len(levels) != len(ends) + 1:
            raise contradiction(
                self,
                "intervals of steps and their ends do not match",
                "difficulty",
                "max_step",
                want="one difficulty more than ends: the last interval has no end",
            )
        if isinstance(ends, tuple) and list(ends) != sorted(ends):
            raise contradiction(self, "the ends of intervals decrease", "max_step", want="increasing steps")


def check_schedule(config: Config, switch: str = "") -> None:
    """Raise `ConfigError` for bounds out of order, or if the switch is on and the schedule lacks a required key."""
    check_order(config, "min_difficulty", "max_difficulty")
    if switch:
        needed = _REQUIRED.get(config["schedule_type"], ())
        check_needed(config, switch, "min_difficulty", "max_difficulty", "schedule_type", *needed)


@attrs.frozen
class CurriculumConfig(Config):
    """`curriculum_learning`, as it was before data efficiency: training starts with short sequences."""

    enabled: bool = key(
        False, "tell the model at each step how long sequences may be", NotYet("curriculum learning by length")
    )
    curriculum_type: str | None = key(None, "what is made easier; only 'seqlen' does anything", PartOf())
    min_difficulty: int | None = key(None, "length at the first step", PartOf(), unit="tokens", over=0)
    max_difficulty: int | None = key(None, "length from the end of the schedule on", PartOf(), unit="tokens", over=0)
    schedule_type: ScheduleType | None = key(None, "how lengths grow from the least to the greatest", PartOf())
    schedule_config: CurriculumScheduleConfig = key(CurriculumScheduleConfig, "the numbers of the schedule")

    def check(self) -> None:
        """Raise `ConfigError` for lengths out of order and for a curriculum without a schedule."""
        check_schedule(self, "enabled")
