"""How the batches of `initialize(training_data=)` are drawn: by a curriculum over samples, by tokens, or neither."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import attrs
import numpy as np

from fds.collectives import Axis
from fds.config.function_call import FunctionCall, optimizer_call, schedule_of_difficulty
from fds.config.keys.data import OF_SCHEDULES
from fds.config.record import Config
from fds.config.training import TrainingConfig
from fds.data import (
    BatchOrder,
    CurriculumSampler,
    SampleMetric,
    SequenceLength,
    TokenBatches,
    TokenFile,
    analyse,
    batches_by_tokens,
    read_metric,
)  # fmt: skip
from fds.data.curriculum import SortedSamples
from fds.errors import ConfigError
from fds.optim import Optimizer

_PATH = "data_efficiency.data_sampling"
_LENGTHS = "seqlen"  # the metric of lengths in `metrics_path`
_ORDER = ".order.npy"  # of a metric that `fds.data.analyse` left


@attrs.frozen
class Percentile:
    """The hundredths of a schedule whose greatest difficulty stands for all samples."""

    schedule: Callable[[int], int]
    greatest: int

    def __call__(self, step: int) -> Fraction:
        """Return the percentile of a step, exactly."""
        return Fraction(100 * self.schedule(step), self.greatest)


def draws_by_tokens(config: TrainingConfig) -> bool:
    """Return whether microbatches have other numbers of rows, as tokens allow."""
    return bool(config[f"{_PATH}.dynamic_batching.enabled"])


def order_of(config: TrainingConfig, axis: Axis, data: Any) -> BatchOrder | None:
    """Return the sampler that the JSON asks for, or None. Collective where lengths are measured.

    Raises `ConfigError`, and `DataError` for metrics of other data.
    """
    curriculum, tokens = config[f"{_PATH}.curriculum_learning"], config[f"{_PATH}.dynamic_batching"]
    if curriculum.enabled and tokens.enabled:
        where = f"{_PATH}.curriculum_learning.enabled, {_PATH}.dynamic_batching.enabled"
        raise ConfigError("batches are drawn in two ways", where=where, got="true, true", want="one of them")
    if curriculum.enabled:
        return _curriculum(curriculum, config["data_efficiency.seed"], len(data))
    return _by_tokens(tokens, config["data_efficiency.seed"], axis, data) if tokens.enabled else None


def rate_of(config: TrainingConfig, order: TokenBatches, axis: Axis, schedule: Any, optimizer: Any) -> Any:
    """Return the learning rate that follows the rows of each batch; without a schedule it is the JSON's optimizer's.

    Raises `ConfigError` where there is no such rate.
    """
    method = config[f"{_PATH}.dynamic_batching.lr_scaling_method"]
    if method == "none":
        return schedule
    call = optimizer_call(config)
    rate = schedule if schedule is not None else call and call.args[0]
    if rate is None or isinstance(optimizer, Optimizer):
        raise ConfigError(
            "nobody knows the learning rate that follows the rows of a batch",
            where=f"{_PATH}.dynamic_batching.lr_scaling_method",
            got=f"{method!r}, optimizer={optimizer!r:.60}",
            want='an optimizer in the JSON; or schedule=, and a function of it, such as fds.adamw; or "none"',
        )
    rate = rate.build(None) if isinstance(rate, FunctionCall) else rate
    batch = config.batch
    return order.rate(rate, microbatches_of(config, axis), base=batch.train_batch_size, method=method)


def microbatches_of(config: TrainingConfig, axis: Axis) -> int:
    """Return the number of microbatches of all ranks in a batch."""
    number = config.batch.gradient_accumulation_steps
    assert number is not None
    return number * axis.size


def _curriculum(asked: Config, seed: int, length: int) -> CurriculumSampler:
    metrics, schedules = {}, {}
    for name, metric in asked.curriculum_metrics.items():
        where = f"{_PATH}.curriculum_learning.curriculum_metrics.{name}"
        _check_metric(where, metric)
        schedule = schedule_of_difficulty(metric).build(None)
        percentile = metric.difficulty_type == "percentile"
        schedules[name] = Percentile(schedule, metric.max_difficulty) if percentile else schedule
        single = metric.clustering_type == "single_cluster"
        metrics[name] = np.broadcast_to(np.uint8(0), length) if single else _sorted_samples(metric)
    sections = asked.curriculum_metrics.items()
    return CurriculumSampler(
        metrics,
        schedules,
        key=seed,
        difficulty={name: metric.difficulty_type for name, metric in sections},
        clustering={name: metric.clustering_type for name, metric in sections},
        folder=asked.data_cluster_path if len(metrics) > 1 else None,
    )


def _check_metric(where: str, metric: Config) -> None:
    clustered = metric.clustering_type != "single_cluster"
    needed = ["difficulty_type", "clustering_type", "min_difficulty", "max_difficulty", "schedule_type"]
    needed += ["index_to_sample_path"] * clustered
    needed += ["index_to_metric_path"] * (clustered and metric.difficulty_type == "value")
    needed += OF_SCHEDULES.get(metric.schedule_type, ())
    absent = [name for name in needed if metric[name] is None]
    if absent:
        paths = ", ".join(f"{where}.{name}" for name in absent)
        raise ConfigError("a metric of a curriculum lacks keys", where=paths, got="null", want="a value each")
    if metric.difficulty_type == "percentile" and metric.max_difficulty < 1:
        got, want = str(metric.max_difficulty), "1 or more, which stands for all samples"
        raise ConfigError("no percentiles", where=f"{where}.max_difficulty", got=got, want=want)
    if metric.schedule_type == "custom":
        hint = "training_data=None, and a loader with fds.data.CurriculumSampler"
        got, want = "'custom', a function of the program", "fixed_linear, fixed_root or fixed_discrete"
        raise ConfigError("no schedule", where=f"{where}.schedule_type", got=got, want=want, hint=hint)


def _sorted_samples(metric: Config) -> SortedSamples | SampleMetric:
    """Return what an analyser left, mapped into memory: DeepSpeed's lists of samples and values, or our files."""
    folder, name = os.path.split(metric.index_to_sample_path)
    if name.endswith(_ORDER):
        return read_metric(folder, name.removesuffix(_ORDER))
    samples, places = (file := TokenFile(metric.index_to_sample_path)).rows(0, len(file))
    if metric.difficulty_type == "percentile":
        return SortedSamples(samples, lambda position: position)
    values, ones = (file := TokenFile(metric.index_to_metric_path)).rows(0, len(file))
    if len(ones) != len(places) or len(values) != len(places) - 1:
        got, want = (
            f"{len(values)} values",
            f"{len(places) - 1}, one for each sequence of {metric.index_to_sample_path}",
        )
        raise ConfigError("the values do not fit the samples", where=metric.index_to_metric_path, got=got, want=want)
    return SortedSamples(samples, lambda position: values[np.searchsorted(places, position, "right") - 1])


def _by_tokens(asked: Config, seed: int, axis: Axis, data: Any) -> TokenBatches:
    metrics = {_LENGTHS: SequenceLength()}
    if asked.metrics_path is None:
        with tempfile.TemporaryDirectory() as folder:
            lengths = analyse(data, metrics, folder, show=False)[_LENGTHS].values.copy()
    else:
        lengths = analyse(data, metrics, asked.metrics_path, axis=axis, show=False)[_LENGTHS].values
    return batches_by_tokens(
        lengths,
        asked.max_tokens,
        order=asked.sequence_picking_order,
        min_rows=max(asked.min_batch_size, 1),
        max_rows=asked.max_batch_size,
        key=seed,
    )
