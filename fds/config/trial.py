"""A trial of a configuration, which `fds tune` starts or the configuration itself asks for.

Of `fds tune` the environment has a file, and `fds.initialize` takes the configuration in it in the place of the
script's own. With `"autotuning": {"enabled": true}` in the script's own the process is a trial of that. The step times
calls, writes what it has found as the engine of DeepSpeed does, and ends the process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from fds import tree
from fds.config.training import TrainingConfig
from fds.errors import ConfigError
from fds.profiling import profile_memory
from fds.state import State
from fds.step import Step
from fds.step.all_stations import Program, Run, Stations
from fds.step.checks.state_check import StateTensors

VARIABLE = "FDS_TRIAL"  # the path of a file
_METRIC, _SIZE = "autotuning_metric.json", "autotuning_model_info.json"  # as DeepSpeed calls them


@attrs.frozen
class Trial:
    """What a script is tried for.

    Attributes:
        config: the JSON that it trains by.
        out: the file into which the first rank writes what was found, as JSON: `latency` in microseconds of a call and
            `throughput` in rows of all ranks a second; of one that weighs `num_params` and `activation_mem_per_gpu`.
        start: calls before the clock starts.
        end: calls after which it stops.
        weighs: whether the size of the model is asked for, and not the time: at the first call.
    """

    config: Mapping[str, Any]
    out: str
    start: int
    end: int
    weighs: bool = False

    def written(self, path: Path) -> Path:
        """Write it to a file, for the environment of a script, and return the path."""
        path.write_text(json.dumps(attrs.asdict(self)), encoding="utf-8")
        return path

    def tell(self, answer: Mapping[str, Any]) -> None:
        """Write what was found, whole or not at all. Raises `ConfigError` where that cannot be."""
        half = Path(f"{self.out}.half")
        try:
            half.write_text(json.dumps(answer), encoding="utf-8")
            half.replace(self.out)
        except OSError as error:
            raise ConfigError(
                "what a trial has found cannot be written",
                where="autotuning.metric_path, autotuning.model_info_path",
                got=f"{type(error).__name__}: {error}",
                want="the path of a file",
            ) from error


def trial_of(environ: Mapping[str, str]) -> Trial | None:
    """Return the trial that this process is, None where it is none. Raises `ConfigError` for a file that is none."""
    if (path := environ.get(VARIABLE)) is None:
        return None
    try:
        return Trial(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError("not a trial", where=VARIABLE, got=path, hint=f"{type(error).__name__}: {error}") from None


def trial_asked_by(config: TrainingConfig) -> Trial | None:
    """Return the trial that a configuration asks for of itself, None where it asks for none."""
    section = config.autotuning
    if not section.enabled:
        return None
    weighs = section.model_info is not None and section.model_info.profile
    out = section.model_info_path or _SIZE if weighs else section.metric_path or _METRIC
    return Trial(
        config.to_dict(), str(Path(out).absolute()), section.start_profile_step, section.end_profile_step, weighs
    )


@attrs.frozen(eq=False, repr=False)
class OnTrial:
    """A filler of `run`: calls are timed, and the process ends after the last."""

    run: Run
    trial: Trial
    step: Step  # the same without it
    rows: int  # of a call, of all ranks
    is_first: bool  # whether this rank tells
    begins: dict[str, float] = tree.new(dict)

    def __repr__(self) -> str:
        return f"{self.run}, on trial"

    def refuse(self, step: Stations) -> None:
        """Refuse what the one inside does."""
        self.run.refuse(step)

    def __call__(
        self, program: Program, state: State, held: StateTensors, batch: Any
    ) -> tuple[State, dict[str, Tensor]]:
        """Do the work. Raises `SystemExit` once the trial is done."""
        if self.trial.weighs:
            self.end(self.weighed(state, batch))
        calls = int(state.calls)
        if calls == self.trial.start:
            self.begins["clock"] = time.perf_counter()
        new, metrics = self.run(program, state, held, batch)
        if "clock" in self.begins and calls + 1 >= self.trial.end:
            tree.values_of(metrics["loss"])  # which waits for the device
            seconds = (time.perf_counter() - self.begins["clock"]) / (calls + 1 - self.trial.start)
            self.end({"latency": seconds * 1e6, "throughput": self.rows / seconds})
        return new, metrics

    def weighed(self, state: State, batch: Any) -> dict[str, int]:
        """Return the parameters of the model, and the bytes of activations of this batch."""
        shapes = self.step.structure_of(state.params)[0].shapes
        memory = profile_memory(self.step, state, batch)
        return {"num_params": sum(shape.numel() for shape in shapes), "activation_mem_per_gpu": memory.activations}

    def end(self, answer: Mapping[str, Any]) -> None:
        """Tell what was found, and end the process."""
        if self.is_first:
            self.trial.tell(answer)
        raise SystemExit(0)
