"""Autotuning: short experiments with different batch sizes and ZeRO stages, to find the fastest.

Source: DeepSpeed 0.19.6, for keys and defaults.
"""

from __future__ import annotations

from typing import Literal

import attrs

from fds.config.contradiction import check_order
from fds.config.field import key
from fds.config.meaning import NotYet, PartOf
from fds.config.record import Config

_ORDERED = (
    ("start_profile_step", "end_profile_step"),
    ("min_train_batch_size", "max_train_batch_size"),
    ("min_train_micro_batch_size_per_gpu", "max_train_micro_batch_size_per_gpu"),
)
_TUNES = PartOf("autotuning.enabled")


@attrs.frozen
class ModelInfoConfig(Config):
    """`autotuning.model_info`: properties of the model, which would otherwise be measured by a run."""

    profile: bool = key(False, "run once only to find out what follows, and the memory of activations", _TUNES)
    num_params: int | None = key(None, "parameters of the whole model; null: count", _TUNES, unit="elements", low=0)
    hidden_size: int | None = key(
        None, "width of the model, from which bucket sizes follow", _TUNES, unit="elements", over=0
    )
    num_layers: int | None = key(None, "layers of the model", _TUNES, unit="layers", over=0)


@attrs.frozen
class AutotuningConfig(Config):
    """`autotuning`: the experiments, and which settings they try."""

    enabled: bool = key(False, "run experiments, to find the fastest settings", NotYet("autotuning"))
    fast: bool = key(True, "try ZeRO stages and microbatch sizes only, no buckets", PartOf())
    results_dir: str = key("autotuning_results", "directory for what the experiments measured", PartOf())
    exps_dir: str = key("autotuning_exps", "directory for the settings of each experiment", PartOf())
    overwrite: bool = key(True, "run again what has a result, instead of reading it", PartOf(), documented=False)
    start_profile_step: int = key(
        3,
        "step at which an experiment starts its clock, after some to warm up",
        PartOf(),
        unit="steps",
        low=0,
        old=("start_step",),
    )
    end_profile_step: int = key(5, "step at which it stops its clock", PartOf(), unit="steps", low=0, old=("end_step",))
    metric: Literal["throughput", "latency", "flops"] = key(
        "throughput", "what ranks experiments: samples a second, seconds a step, or FLOPs a second and GPU", PartOf()
    )
    metric_path: str | None = key(
        None, "file for what an experiment measured; null: in the working directory", PartOf()
    )
    tuner_type: Literal["gridsearch", "random", "model_based"] = key(
        "gridsearch",
        "which experiment is next: in order, at random, or by a fitted model of cost",
        PartOf(),
        documented="model_based",
    )
    tuner_early_stopping: int = key(
        5, "experiments without a better one after which the search ends", PartOf(), unit="experiments", low=0
    )
    tuner_num_trials: int = key(50, "most experiments in one search", PartOf(), unit="experiments", low=0)
    arg_mappings: dict[str, str] | None = key(
        None, "key of this JSON -> option of the script that sets the same; experiments set both", PartOf()
    )
    model_info: ModelInfoConfig | None = key(None, "what is known of the model; null: a run finds out")
    model_info_path: str | None = key(
        None, "file for what that run finds out; null: in the working directory", PartOf()
    )
    mp_size: int = key(1, "ranks that share one copy of the model", PartOf(), unit="ranks", over=0)
    max_train_batch_size: int | None = key(
        None, "largest whole batch of an update to try; null: no bound", PartOf(), unit="rows", over=0
    )
    min_train_batch_size: int = key(1, "least whole batch of an update to try", PartOf(), unit="rows", over=0)
    max_train_micro_batch_size_per_gpu: int = key(1024, "largest microbatch to try", PartOf(), unit="rows", over=0)
    min_train_micro_batch_size_per_gpu: int = key(1, "least microbatch to try", PartOf(), unit="rows", over=0)
    num_tuning_micro_batch_sizes: int = key(
        3, "microbatch sizes to try between the bounds", PartOf(), unit="sizes", over=0
    )

    def check(self) -> None:
        """Raise `ConfigError` if it is enabled and a lower bound exceeds its upper bound."""
        if self.enabled is True:
            for first, last in _ORDERED:
                check_order(self, first, last)
