"""What a run tells of itself, as records."""

import math

import pytest

from fds.config.keys.data import (
    CometConfig,
    CommsLoggerConfig,
    CsvMonitorConfig,
    FlopsProfilerConfig,
    LoggingConfig,
    TensorBoardConfig,
    WandbConfig,
)
from fds.config.record import Config
from fds.errors import ConfigError

MONITOR = {"enabled": True, "output_path": "output/ds_logs/", "job_name": "train_bert"}
EXAMPLES: list[tuple[type[Config], dict]] = [
    (
        LoggingConfig,
        {
            "steps_per_print": 10,
            "wall_clock_breakdown": False,
            "dump_state": False,
            "timers": {"throughput": {"enabled": True, "synchronized": False}},
        },
    ),
    (TensorBoardConfig, MONITOR),
    (CsvMonitorConfig, MONITOR),
    (WandbConfig, {"enabled": True, "group": "my_group", "team": "my_team", "project": "my_project"}),
    # reference/003 says 32 to 50 characters of a key, and has one of 31 in its example: lengths are Comet's to check
    (
        CometConfig,
        {
            "enabled": True,
            "project": "my_project",
            "samples_log_interval": 50,
            "mode": "get",
            "experiment_name": "llama-fine-tuning",
            "experiment_key": "0c4a1c4a90664f2a8084e600b19a9d7",
            "online": False,
        },
    ),
    (
        CommsLoggerConfig,
        {
            "enabled": True,
            "verbose": False,
            "prof_all": False,
            "debug": False,
            "prof_ops": ["all_reduce", "all_gather"],
        },
    ),
    (
        FlopsProfilerConfig,
        {
            "enabled": True,
            "profile_step": 1,
            "module_depth": -1,
            "top_modules": 1,
            "detailed": True,
            "output_file": None,
        },
    ),
]


@pytest.mark.parametrize(("record", "example"), EXAMPLES, ids=lambda it: getattr(it, "__name__", ""))
def test_the_documented_example_comes_back_as_it_went_in(record, example):
    assert record.from_dict(example).to_dict() == example


def test_what_is_not_said_is_deepspeeds():
    assert FlopsProfilerConfig().top_modules == 1 and CommsLoggerConfig().prof_ops == ()
    assert LoggingConfig().steps_per_print is None and LoggingConfig()["timers.throughput.synchronized"] is True


def test_the_documentation_says_other_defaults():
    assert LoggingConfig(defaults="docs").steps_per_print == 10
    assert TensorBoardConfig(defaults="docs").output_path is CsvMonitorConfig(defaults="docs").output_path is None
    assert (CometConfig(defaults="docs").online, CometConfig(defaults="docs").mode) == (True, "get_or_create")


def test_never_printing_is_an_infinite_number_of_steps():
    """As accelerate sets it."""
    assert LoggingConfig(steps_per_print=math.inf).steps_per_print == math.inf
    assert LoggingConfig(steps_per_print=2000.0).steps_per_print == 2000


def test_a_level_may_be_in_capitals():
    assert LoggingConfig(log_level="INFO") != LoggingConfig(log_level="info")


@pytest.mark.parametrize(
    ("record", "wrong", "where"),
    [
        (LoggingConfig, {"steps_per_print": "10"}, "steps_per_print"),
        (LoggingConfig, {"steps_per_print": 0}, "steps_per_print"),
        (LoggingConfig, {"log_level": "loud"}, "log_level"),
        (LoggingConfig, {"dump_states": True}, "dump_states"),
        (LoggingConfig, {"timers": {"throughput": {"synchronised": True}}}, "timers.throughput.synchronised"),
        (TensorBoardConfig, {"enabled": "yes"}, "enabled"),
        (CsvMonitorConfig, {"job_name": 3}, "job_name"),
        (WandbConfig, {"entity": "me"}, "entity"),
        (CometConfig, {"mode": "append"}, "mode"),
        (CometConfig, {"samples_log_interval": 0}, "samples_log_interval"),
        (CommsLoggerConfig, {"prof_ops": "all_reduce"}, "prof_ops"),
        (FlopsProfilerConfig, {"module_depth": -2}, "module_depth"),
        (FlopsProfilerConfig, {"profile_step": 1.5}, "profile_step"),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_its_path(record, wrong, where):
    with pytest.raises(ConfigError) as refused:
        record.from_dict(wrong)
    assert refused.value.where == where
