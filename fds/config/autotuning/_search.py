"""DeepSpeed's search among the experiments of `autotuning`, around a function that measures one of them.

Of each stage, from the least on, the largest microbatch that runs is looked for, between it and its half the fastest,
and unless `fast` then the fastest of all combinations, in order (`gridsearch`) or at random. A stage on which no larger
microbatch fits than the best of those before it is left out.

Source: DeepSpeed 0.19.6, `autotuning/autotuner.py` and `tuner/`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator

import attrs

from fds.config.autotuning._experiments import MICRO, Autotuning, Experiment
from fds.errors import ConfigError, is_int, is_number

PLATEAU = 0.05  # less is no gain


@attrs.frozen
class Trial:
    """An experiment that was measured, and its value; None if it did not run."""

    experiment: Experiment
    value: float | None


@attrs.frozen
class ModelSize:
    """What is known of the model before the first experiment.

    Attributes:
        num_params: its parameters.
        activation_bytes: of a microbatch of one row.
        hidden_size: its width, from which sizes of messages of stage 3 follow; None: the usual ones.
    """

    num_params: int
    activation_bytes: int
    hidden_size: int | None = None


def search(
    tuning: Autotuning,
    measure: Callable[[Experiment], float | None],
    *,
    model: ModelSize,
    memory_bytes: int,
    seed: int = 0,
) -> list[Trial]:
    """Return the trials of DeepSpeed's search, in their order; none is measured twice.

    Args:
        tuning: the JSON and its section.
        measure: returns the section's `metric` of an experiment, of which less is better for `"latency"`, or None for
            one that did not run. What it raises ends the search.
        model: what is known of it.
        memory_bytes: of a rank.
        seed: of the order where `tuner_type` is `"random"`.

    Raises `ConfigError` for arguments of other types, sizes below 1, a `tuner_type` "model_based", and what `measure`
    returns that is no number.
    """
    for name, value, holds, want in (
        ("tuning", tuning, isinstance(tuning, Autotuning), "Autotuning.of(json, ranks=...)"),
        ("measure", measure, callable(measure), "a function of an experiment"),
        ("model", model, isinstance(model, ModelSize), "a ModelSize"),
        ("seed", seed, is_int(seed), "an int"),
    ):
        if not holds:
            raise ConfigError("a search cannot use this", where=name, got=repr(value)[:80], want=want)
    for name, value in (("memory_bytes", memory_bytes), *attrs.asdict(model).items()):
        if not is_int(value, 1) and not (name == "hidden_size" and value is None):
            raise ConfigError("not a size", where=name, got=repr(value)[:80], want="an int >= 1")
    if tuning.section.tuner_type == "model_based":
        raise ConfigError(
            "experiments are not chosen by a fitted model of cost",
            where="autotuning.tuner_type",
            got="'model_based'",
            want='"gridsearch" or "random"',
        )
    state = _Search(tuning, measure, model, memory_bytes, random.Random(seed))
    before = _Best()
    for stage in tuning.stages:
        if memory_bytes > tuning.state_bytes(model.num_params, stage) + model.activation_bytes:
            best = state.of_stage(stage, before)
            before = best if best.rows > before.rows else before
    return state.trials


def best_of(tuning: Autotuning, trials: Iterable[Trial]) -> Trial | None:
    """Return the first of the best trials, by the section's `metric`; None where none ran."""
    ran = [trial for trial in trials if trial.value]
    return max(ran, key=lambda trial: _better(tuning, trial.value), default=None)


def _better(tuning: Autotuning, value: float | None) -> float:
    """Return a number that is larger for what is better, 0 for what did not run."""
    return 0.0 if not value else 1 / value if tuning.section.metric == "latency" else value


@attrs.frozen
class _Best:
    """The largest microbatch of a stage that runs, the best one, and how good it is; zeros where nothing ran."""

    most: int = 0
    rows: int = 0
    value: float = 0.0


@attrs.define
class _Search:
    tuning: Autotuning
    measure: Callable[[Experiment], float | None]
    model: ModelSize
    memory_bytes: int
    rng: random.Random
    trials: list[Trial] = attrs.Factory(list)
    values: dict[str, float] = attrs.Factory(dict)  # by name of an experiment

    def run(self, experiment: Experiment) -> float:
        """Return how good an experiment is, measured once; 0 if it does not run."""
        if experiment.name not in self.values:
            value = self.measure(experiment)
            if value is not None and not (is_number(value) and 0 <= value < math.inf):
                where = f"measure({experiment.name})"
                raise ConfigError("not a measurement", where=where, got=repr(value)[:80], want="a number, or None")
            self.trials.append(Trial(experiment, value))
            self.values[experiment.name] = _better(self.tuning, value)
        return self.values[experiment.name]

    def of_stage(self, stage: int, before: _Best) -> _Best:
        """Return the best of a stage, after those of the stages before it."""
        tuning, listed = self.tuning, self.tuning.data.get(MICRO)
        free = int(self.memory_bytes - tuning.state_bytes(self.model.num_params, stage))
        largest = free // self.model.activation_bytes
        if largest < before.most:
            return _Best()
        tried: dict[int, float] = {}  # rows of a microbatch -> how good it is, of experiments that try nothing else
        if isinstance(listed, list):
            least, most = min(listed), max(listed)
        else:
            least, most = self.bounds(stage, before.most, largest, tried)
        sizes, rows = tuning.microbatches(least, most)
        if most < before.most or not sizes:
            return _Best()
        sizes = self.microbatches(stage, least, sizes, rows, tried)
        fastest = max(tried, key=lambda n: tried[n])
        best = _Best(most, fastest, tried[fastest])
        if tuning.section.fast or stage == 0 or best.rows <= before.rows or best.value < before.value:
            return best
        product = tuning.experiments(stage, sizes, rows, hidden_size=self.model.hidden_size)
        value, experiment = max(self.of_product(product), key=lambda pair: pair[0])
        return _Best(most, experiment.rows, value) if value > best.value else best

    def try_microbatch(self, stage: int, rows: int, accumulation: int, tried: dict[int, float]) -> float:
        """Return how good a microbatch is; 0 if it does not run."""
        value = self.run(self.tuning.experiment(stage, rows, accumulation))
        tried[rows] = max(value, tried.get(rows, 0.0))
        return value

    def bounds(self, stage: int, least: int, largest: int, tried: dict[int, float]) -> tuple[int, int]:
        """Return the least and largest microbatch to try, found by halving; zeros where the least does not run.

        The search ends early where a larger microbatch is no longer better.
        """
        tuning, section = self.tuning, self.tuning.section
        runs = lambda rows: self.try_microbatch(stage, rows, tuning.accumulation, tried)
        if least > largest:
            return 0, 0
        if least < 1:
            asked, lowest = tuning.data.get(MICRO), section.min_train_micro_batch_size_per_gpu
            least = asked if is_int(asked, 1) else 1
            if not runs(least):
                if lowest == least or not runs(lowest):
                    return 0, 0
                least = lowest
        elif not runs(least):
            return 0, 0
        bound, fitting = tuning.largest_rows, {least}
        largest = min(largest, bound)
        for rows in (math.ceil(1.05 * largest), largest, int(0.95 * largest)):
            if 1 <= rows <= bound and (rows in fitting or runs(rows)):
                return least, rows
        previous = tried[min(tried, key=lambda rows: abs(rows - least))]
        low, high = least, largest
        while low <= high:
            middle = (low + high) // 2
            if middle in fitting:
                low = middle + 1
            elif value := runs(middle):
                low, gain = middle + 1, (value - previous) / previous if previous else 1.0
                fitting.add(middle)
                if gain < PLATEAU:
                    break
                previous = value
            else:
                high = middle - 1
        return least, low - 1

    def microbatches(self, stage: int, least: int, sizes: list[int], rows: int, tried: dict[int, float]) -> list[int]:
        """Return the sizes, the largest replaced by a smaller one that is better with as many microbatches."""
        run = lambda n: self.try_microbatch(stage, n, rows // n, tried)
        values = [run(n) for n in sizes]
        if isinstance(self.tuning.data.get(MICRO), list):
            return sizes
        best, most = values[-1], sizes[-1]
        low = sizes[-2] + 1 if len(sizes) > 1 else least
        chosen = most
        for n in reversed(range(low, most, max((most - low) // 3, 1))):
            value = run(n)
            if value <= best * (1 + PLATEAU):
                break
            best, chosen = value, n
        return [*sizes[:-1], chosen]

    def of_product(self, experiments: list[Experiment]) -> Iterator[tuple[float, Experiment]]:
        """Measure experiments until none was better for a while, and yield how good each is."""
        section, waiting = self.tuning.section, list(experiments)
        best, at = 0.0, 0
        for i in range(min(section.tuner_num_trials, len(experiments))):
            experiment = waiting.pop(self.rng.randrange(len(waiting)) if section.tuner_type == "random" else 0)
            value = self.run(experiment)
            if value > best or not best:
                best, at = value, i
            yield value, experiment
            if section.tuner_early_stopping and i + 1 >= at + section.tuner_early_stopping:
                return
