"""Autotuning: run short experiments with other batch sizes and ZeRO stages, and keep the fastest.

Source: reference/003 and features.md 1.9; defaults as DeepSpeed 0.19.6 has them.
"""

from __future__ import annotations

from typing import Literal

import attrs

from fds.config.contradiction import refuse_disorder
from fds.config.meaning import NotYet, Part
from fds.config.record import Config, key

_ORDERED = (
    ("start_profile_step", "end_profile_step"),
    ("min_train_batch_size", "max_train_batch_size"),
    ("min_train_micro_batch_size_per_gpu", "max_train_micro_batch_size_per_gpu"),
)
_TUNES = Part("autotuning.enabled")


@attrs.frozen
class ModelInfoConfig(Config):
    """`autotuning.model_info`: what is known of the model, so that no run has to find out."""

    profile: bool = key(False, "run once only to find out what follows, and the memory of activations", _TUNES)
    num_params: int | None = key(None, "parameters of the whole model; null: count", _TUNES, unit="elements", low=0)
    hidden_size: int | None = key(
        None, "width of the model, from which bucket sizes follow", _TUNES, unit="elements", over=0)
    num_layers: int | None = key(None, "layers of the model", _TUNES, unit="layers", over=0)


@attrs.frozen
class AutotuningConfig(Config):
    """`autotuning`: the experiments, and which settings they try.

    Raises `ConfigError` where it is enabled and a first step or least size exceeds its last or largest.
    """

    enabled: bool = key(False, "run experiments, to find the fastest settings", NotYet("autotuning"))
    fast: bool = key(True, "try ZeRO stages and microbatch sizes only, no buckets", Part())
    results_dir: str = key("autotuning_results", "directory for what the experiments measured", Part())
    exps_dir: str = key("autotuning_exps", "directory for the settings of each experiment", Part())
    overwrite: bool = key(True, "run again what has a result, instead of reading it", Part(), documented=False)
    start_profile_step: int = key(
        3, "step at which an experiment starts its clock, after some to warm up", Part(),
        unit="steps", low=0, old=("start_step",),
    )  # fmt: skip
    end_profile_step: int = key(
        5, "step at which it stops its clock", Part(), unit="steps", low=0, old=("end_step",))
    metric: Literal["throughput", "latency", "flops"] = key(
        "throughput", "what ranks experiments: samples a second, seconds a step, or FLOPs a second and GPU", Part())
    metric_path: str | None = key(None, "file for what an experiment measured; null: in the working directory", Part())
    tuner_type: Literal["gridsearch", "random", "model_based"] = key(
        "gridsearch", "which experiment is next: in order, at random, or by a fitted model of cost", Part(),
        documented="model_based",
    )  # fmt: skip
    tuner_early_stopping: int = key(
        5, "experiments without a better one after which the search ends", Part(), unit="experiments", low=0)
    tuner_num_trials: int = key(50, "most experiments in one search", Part(), unit="experiments", low=0)
    arg_mappings: dict[str, str] | None = key(
        None, "key of this JSON -> option of the script that sets the same; experiments set both", Part())
    model_info: ModelInfoConfig | None = key(None, "what is known of the model; null: a run finds out")
    model_info_path: str | None = key(
        None, "file for what that run finds out; null: in the working directory", Part())
    mp_size: int = key(1, "ranks that share one copy of the model", Part(), unit="ranks", over=0)
    max_train_batch_size: int | None = key(
        None, "largest whole batch of an update to try; null: no bound", Part(), unit="rows", over=0)
    min_train_batch_size: int = key(1, "least whole batch of an update to try", Part(), unit="rows", over=0)
    max_train_micro_batch_size_per_gpu: int = key(1024, "largest microbatch to try", Part(), unit="rows", over=0)
    min_train_micro_batch_size_per_gpu: int = key(1, "least microbatch to try", Part(), unit="rows", over=0)
    num_tuning_micro_batch_sizes: int = key(
        3, "microbatch sizes to try between the bounds", Part(), unit="sizes", over=0)

    def check(self) -> None:
        """Raise `ConfigError` where a least value exceeds the largest. What is switched off is not looked at."""
        if self.enabled is True:
            for first, last in _ORDERED:
                refuse_disorder(self, first, last)
