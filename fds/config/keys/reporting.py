"""Reporting: progress, timers, monitors, logs of collectives, FLOPs.

Source: DeepSpeed 0.19.6, for keys and defaults.
"""

from __future__ import annotations

import math
from typing import Literal

import attrs

from fds.config.field import key
from fds.config.meaning import Elsewhere, NotApplicable, PartOf, argument
from fds.config.record import Config

LogLevel = Literal["debug", "info", "warning", "error", "critical", "DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
_PRINTS_NOTHING = NotApplicable("a step prints nothing, it returns metrics")
_MONITOR = Elsewhere("config.monitor(mesh)")


@attrs.frozen
class ThroughputTimerConfig(Config):
    """`timers.throughput`: how the samples per second of a progress line are measured."""

    enabled: bool = key(True, "whether to time updates, for the rate in the progress line", _PRINTS_NOTHING)
    synchronized: bool = key(
        True, "whether to wait for the device before a clock is read: exact, but slower", _PRINTS_NOTHING
    )


@attrs.frozen
class TimersConfig(Config):
    """`timers`: timers that run by default."""

    throughput: ThroughputTimerConfig = key(ThroughputTimerConfig, "the clock of samples per second")


@attrs.frozen
class LoggingConfig(Config):
    """Keys of the top level on what the engine prints and measures."""

    steps_per_print: int | float | None = key(
        None,
        "updates between two lines of progress; null or Infinity: no such line",
        Elsewhere("config.monitor(mesh)", "by fds.monitors.Console(every=)"),
        unit="steps",
        documented=10,
        over=0,
        high=math.inf,
    )
    wall_clock_breakdown: bool = key(
        False,
        "measure how long forward, backward, reduction and update take, of every step",
        Elsewhere("config.timed(mesh)", "of the calls that steps_per_print names, or of all"),
    )
    memory_breakdown: bool = key(
        False,
        "measure how much memory is in use before and after the parts of a step",
        Elsewhere("config.memory_breakdown(mesh)", "of the calls that steps_per_print names, or of all"),
    )
    dump_state: bool = key(
        False,
        "print what the engine knows after it has started",
        Elsewhere("config.dump_state(state, step)", "as `fds.initialize` does with the first state"),
    )
    log_level: LogLevel | None = key(
        None,
        "least severe message that is printed; null leaves it as it is",
        NotApplicable("nothing is logged: what must be said is raised or warned of"),
    )
    timers: TimersConfig = key(TimersConfig, "clocks that run unless they are switched off")


@attrs.frozen
class TensorBoardConfig(Config):
    """`tensorboard`: write metrics as TensorBoard events."""

    enabled: bool = key(False, "write metrics as TensorBoard events, on rank 0", _MONITOR)
    output_path: str | None = key(
        "", "directory of all jobs; empty: one below the working directory", PartOf(), documented=None, null=False
    )
    job_name: str = key("DeepSpeedJobName", "directory of this job, below output_path", PartOf())


@attrs.frozen
class CsvMonitorConfig(Config):
    """`csv_monitor`: write metrics as CSV, a file for each."""

    enabled: bool = key(False, "append metrics to CSV files, one a metric, on rank 0", _MONITOR)
    output_path: str | None = key(
        "", "directory of all jobs; empty: one below the working directory", PartOf(), documented=None, null=False
    )
    job_name: str = key("DeepSpeedJobName", "directory of this job, below output_path", PartOf())


@attrs.frozen
class WandbConfig(Config):
    """`wandb`: send metrics to Weights & Biases."""

    enabled: bool = key(False, "send metrics to Weights & Biases, from rank 0", _MONITOR)
    group: str | None = key(None, "what runs are grouped by there", PartOf())
    team: str | None = key(None, "account that the run belongs to; null: the user's own", PartOf())
    project: str = key("deepspeed", "project that the run is filed under", PartOf())


@attrs.frozen
class CometConfig(Config):
    """`comet`: send metrics to Comet. What is null here, its own files and environment variables may say."""

    enabled: bool = key(False, "send metrics to Comet, from rank 0", _MONITOR)
    samples_log_interval: int = key(
        100, "samples of training between two values of a metric that are sent", PartOf(), unit="samples", over=0
    )
    project: str | None = key(None, "project that the experiment is filed under", PartOf())
    workspace: str | None = key(None, "account that the project belongs to", PartOf())
    api_key: str | None = key(None, "secret that proves who sends; better kept out of a file", PartOf())
    experiment_name: str | None = key(None, "title that people see", PartOf())
    experiment_key: str | None = key(None, "identifier of an experiment, 32 to 50 letters and digits", PartOf())
    online: bool | None = key(
        None, "send at once (null does so too), or keep on disk to be sent later", PartOf(), documented=True
    )
    mode: Literal["get", "create", "get_or_create"] | None = key(
        None,
        "continue the experiment of experiment_key, start another, or whichever is possible (null)",
        PartOf(),
        documented="get_or_create",
    )


@attrs.frozen
class CommsLoggerConfig(Config):
    """`comms_logger`: log the time and bandwidth of collectives."""

    enabled: bool = key(
        False,
        "time every collective, waiting for it, and sum up by kind and message size",
        Elsewhere("config.messages(mesh)", "it waits for nothing"),
    )
    verbose: bool = key(False, "print each collective as it ends, not only their sums", PartOf())
    prof_all: bool = key(True, "log collectives of every kind", PartOf())
    debug: bool = key(False, "add the calling function to the name of each", PartOf())
    prof_ops: tuple[str, ...] = key((), "names of the kinds to log, where prof_all is false", PartOf())


@attrs.frozen
class FlopsProfilerConfig(Config):
    """`flops_profiler`: count the work of one step, module by module."""

    enabled: bool = key(
        False, "count operations, parameters and time of one step, by module", argument("profiled", note="on rank 0")
    )
    recompute_fwd_factor: float = key(
        0.0,
        "forwards that backward computes again: 1 where all activations are checkpointed",
        NotApplicable("what backward computes again is counted, not assumed"),
        low=0,
    )
    profile_step: int = key(
        1,
        "the step that is profiled; some before it should warm up",
        argument("profiled", name="at"),
        unit="steps",
        low=0,
    )
    module_depth: int = key(
        -1,
        "levels of nested modules that are told of; -1: all",
        argument("profiled", name="depth", note="-1 is None"),
        unit="levels",
        low=-1,
    )
    top_modules: int = key(
        1,
        "most expensive modules that are named at each level",
        argument("profiled", name="top"),
        unit="modules",
        low=0,
    )
    detailed: bool = key(
        True, "print the profile of every module, not only the sums", argument("profiled", name="detailed")
    )
    output_file: str | None = key(
        None, "file to write the profile to; null: print it", argument("profiled", name="file")
    )
