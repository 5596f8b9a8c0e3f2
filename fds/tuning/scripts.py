"""A script of the user's, run again and again with other configurations: the experiments of `autotuning`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fds.config.autotuning import Autotuning, Experiment, ModelSize, Trial as Measured, best_of, search
from fds.config.composition import axes_of
from fds.config.reading import Unknown
from fds.config.training import TrainingConfig
from fds.config.trial import VARIABLE, Trial
from fds.errors import ConfigError
from fds.tuning.journal import Journal
from fds.tuning.places import Place, place_of
from fds.tuning.search import room_of

BEST = "ds_config_optimal.json"


@attrs.frozen
class Tuned:
    """What came of a search.

    Attributes:
        trials: in their order.
        best: the first of the best.
        file: its configuration.
        python: the program that this comes to.
    """

    trials: tuple[Measured, ...]
    best: Measured
    file: Path
    python: str


def tune_script(
    config: Mapping[str, Any] | str | os.PathLike[str],
    script: Sequence[str],
    *,
    ranks: int = 1,
    limit: float = 600.0,
    memory: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    unknown: Unknown = "error",
    show: Callable[[str], object] = print,
) -> Tuned:
    """Run a script with one configuration after another, in DeepSpeed's order, and write down the fastest.

    The script trains by `fds.initialize` and its loader, or reads the rows of a batch from an option that
    `arg_mappings` names. It is run on all ranks, of this machine or beside those that a launcher has started, and ends
    itself once it has measured.

    Args:
        config: a JSON with the section `autotuning`, in which keys may have lists of values.
        script: its path, and its arguments.
        ranks: processes of each run.
        limit: seconds after which a run counts as one that does not run.
        memory: bytes that a rank may hold; None for its share of what is there.
        device: "cpu" or "cuda", for the memory.
        seed: of the order where `tuner_type` is "random".
        unknown: as `TrainingConfig.of` takes it.
        show: called with a line for each run.

    In `results_dir` are the best configuration, `ds_config_optimal.json`, the program that it comes to beside it, and a
    journal, from which the next search goes on unless `overwrite`; in `exps_dir` a folder for each experiment, with
    what its ranks wrote.

    Raises `ConfigError` for a JSON without autotuning, a script that does not run even once, and where none of the
    experiments runs.
    """
    tuning, place = Autotuning.of(config, ranks=ranks, unknown=unknown), place_of(ranks)
    results = Path(tuning.section.results_dir)
    results.mkdir(parents=True, exist_ok=True)
    file = results / "journal.jsonl" if place.is_first else None
    if file is not None and tuning.section.overwrite:
        file.unlink(missing_ok=True)
    journal = Journal(file, json.dumps([tuning.data, ranks, *script], default=repr))
    journal.answers = place.agree(journal.answers)
    runs = _Runs(tuning, tuple(script), journal, limit, show if place.is_first else lambda line: None, place)
    room = memory or min(place.everyones(room_of(device, place.num_here)))
    trials = search(tuning, runs.measure, model=runs.size(), memory_bytes=room, seed=seed)
    best = best_of(tuning, trials)
    if best is None:
        where = f"{tuning.section.exps_dir}/{trials[-1].experiment.name}" if trials else "autotuning"
        raise ConfigError("none of the experiments runs", where=where, got=f"{len(trials)} that do not")
    chosen, file = TrainingConfig.of(best.experiment.config, unknown=unknown), results / BEST
    python = chosen.explain(axes_of(chosen, ranks))
    if place.is_first:
        file.write_text(json.dumps(best.experiment.config, indent=4) + "\n", encoding="utf-8")
        file.with_suffix(".py").write_text(python + "\n", encoding="utf-8")
    return Tuned(tuple(trials), best, file, python)


@attrs.frozen(eq=False)
class _Runs:
    tuning: Autotuning
    script: tuple[str, ...]
    journal: Journal
    limit: float
    show: Callable[[str], object]
    place: Place

    def size(self) -> ModelSize:
        """Return the size of the model: what the JSON says, and what one run with a microbatch of one row finds."""
        info = self.tuning.section.model_info
        first = self.tuning.experiment(self.tuning.stages[0], 1, 1)
        answer = self.run(attrs.evolve(first, name="model_info"), weighs=True)
        if "num_params" not in answer:
            raise ConfigError(
                "the script does not run", where=f"{self.tuning.section.exps_dir}/model_info", got=answer["why"]
            )
        num_params = (info and info.num_params) or answer["num_params"]
        return ModelSize(num_params, max(1, answer["activation_mem_per_gpu"]), info and info.hidden_size)

    def measure(self, experiment: Experiment) -> float | None:
        """Return the metric of an experiment, None where it does not run."""
        answer = self.run(experiment)
        if "latency" not in answer:
            self.show(f"{experiment.name}: does not run: {answer['why']}")
            return None
        seconds, rows = answer["latency"] * 1e-6, experiment.config["train_batch_size"]
        self.show(f"{experiment.name}: {seconds * 1e3:,.1f} ms a step, {rows / seconds:,.1f} rows a second")
        return seconds if self.tuning.section.metric == "latency" else rows / seconds

    def run(self, experiment: Experiment, *, weighs: bool = False) -> dict[str, Any]:
        """Return what a run of the script told, or `why` it told nothing."""
        if experiment.name in self.journal:
            return self.journal[experiment.name]
        folder = Path(self.tuning.section.exps_dir) / experiment.name
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / "found.json"
        out.unlink(missing_ok=True)
        section = self.tuning.section
        trial = Trial(
            experiment.config, str(out.absolute()), section.start_profile_step, section.end_profile_step, weighs
        )
        command = [sys.executable, *with_options(self.script, section.arg_mappings or {}, experiment.config)]
        path = trial.written(folder / "trial.json")
        environs = [{**environ, VARIABLE: str(path.absolute())} for environ in self.place.environs(self.tuning.ranks)]
        reasons = self.place.everyones(run_command(command, environs, folder, self.limit))
        why = next(filter(None, reasons), "it ended by itself")
        answer = self.place.agree(json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"why": why})
        self.journal[experiment.name] = answer
        return answer


def with_options(script: Sequence[str], options: Mapping[str, str], config: Mapping[str, Any]) -> list[str]:
    """Return the command line of a script in which options have the values of a configuration.

    >>> with_options(["train.py", "--rows", "8"], {"train_micro_batch_size_per_gpu": "--rows"},
    ...     {"train_micro_batch_size_per_gpu": 2})
    ['train.py', '--rows', '2']
    """
    command = list(script)
    for path, name in options.items():
        value, option = _at(config, path.strip()), name.strip()
        if value is None or value == "auto":  # which the script says by itself
            continue
        option = option if option.startswith("-") else f"--{option}"
        if option in command[:-1]:
            command[command.index(option) + 1] = str(value)
        else:
            command = [part for part in command if not part.startswith(f"{option}=")] + [option, str(value)]
    return command


def _at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config


def run_command(command: Sequence[str], environs: Sequence[Mapping[str, str]], folder: Path, limit: float) -> str:
    """Run a command once for each rank, with what it writes in files of the folder; return why it failed, or "".

    All are killed, with the processes that they have started, once one has failed or `limit` seconds have passed.
    """
    ranks = [environ["RANK"] for environ in environs]
    processes, files = [], [folder / f"rank{rank}.log" for rank in ranks]
    try:
        for environ, file in zip(environs, files, strict=True):
            with file.open("w") as log:
                processes.append(
                    subprocess.Popen(
                        command, env={**os.environ, **environ}, stdout=log, stderr=log, start_new_session=True
                    )
                )
        until = time.monotonic() + limit
        while (codes := [process.poll() for process in processes]).count(None):
            if any(codes) or time.monotonic() > until:
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if failed := [i for i, code in enumerate(codes) if code]:
        lines = files[failed[0]].read_text(errors="replace").strip().splitlines() or [f"exit code {codes[failed[0]]}"]
        return f"rank {ranks[failed[0]]}: {_error_of(lines)}"
    return f"not done after {limit:g} s" if None in codes else ""


def _error_of(lines: Sequence[str]) -> str:
    """Return the line of a log that says what went wrong: the last that begins without a blank, as errors do."""
    return next((line for line in reversed(lines) if line[:1].strip()), lines[-1])
