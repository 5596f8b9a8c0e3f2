"""Data efficiency: which samples make a batch, and which tokens of them layers compute.

In 0.19.6 each technique has its own switch (`curriculum_learning.enabled`, `dynamic_batching.enabled`,
`random_ltd.enabled`); those of the groups around them are read and never asked.

Source: reference/003 and features.md 1.13; `runtime/data_pipeline/` of 0.19.6.
"""

from __future__ import annotations

from typing import Literal

import attrs

from fds.config.contradiction import refuse_absence, refuse_disorder, refuse_miscount
from fds.config.keys.curriculum import ENABLED, CurriculumScheduleConfig, Schedule, refuse_incomplete_schedule
from fds.config.meaning import Elsewhere, NotApplicable, NotYet, Part
from fds.config.record import Config, key

_UNASKED = NotApplicable("the switches of the techniques below it decide, in 0.19.6 too")
_WORKERS = "the loader of all batches has one number of workers"


@attrs.frozen
class CurriculumMetricConfig(Config):
    """One measure of how hard a sample is: files that the analysis of the data wrote, and a schedule."""

    index_to_sample_path: str | None = key(None, "file of the samples in the order of difficulty", ENABLED)
    index_to_metric_path: str | None = key(None, "file of the difficulties in that order", ENABLED)
    difficulty_type: Literal["value", "percentile"] | None = key(
        None, "whether difficulties are values of the measure or hundredths of all samples", ENABLED)
    clustering_type: Literal["schedule_based", "single_cluster"] | None = key(
        None, "draw from clusters that grow by the schedule, or from all, which the program then eases", ENABLED)
    min_difficulty: int | None = key(None, "greatest difficulty that is let through at first", ENABLED)
    max_difficulty: int | None = key(None, "greatest difficulty from the end of the schedule on", ENABLED)
    schedule_type: Schedule | None = key(None, "how the difficulty grows from the least to the greatest", ENABLED)
    schedule_config: CurriculumScheduleConfig = key(CurriculumScheduleConfig, "the numbers of the schedule")

    def check(self) -> None:
        """Raise `ConfigError` for difficulties out of order."""
        refuse_incomplete_schedule(self)


@attrs.frozen
class CurriculumSamplingConfig(Config):
    """`curriculum_learning` of data sampling: batches are drawn from what all measures let through."""

    enabled: bool = key(False, "draw easy samples first", NotYet("curriculum learning by metrics of the samples"))
    data_cluster_path: str | None = key(None, "folder for the indices of samples of like difficulty", Part())
    curriculum_metrics: dict[str, CurriculumMetricConfig] = key(dict, "measures of difficulty, by name", Part())

    def check(self) -> None:
        """Raise `ConfigError` for a curriculum without a measure."""
        refuse_absence(self, "enabled", "curriculum_metrics")


@attrs.frozen
class DynamicBatchingConfig(Config):
    """`dynamic_batching` of data sampling: batches of about as many tokens, not as many rows."""

    enabled: bool = key(False, "fill batches by tokens", NotYet("batches of a number of tokens"))
    max_tokens: int | None = key(None, "tokens that a microbatch may have at most", Part(), unit="tokens", over=0)
    min_batch_size: int = key(1, "rows that a microbatch must have at least", Part(), unit="rows", low=0)
    max_batch_size: int | None = key(None, "rows that a microbatch may have at most", Part(), unit="rows", over=0,
                                      null=False)
    lr_scaling_method: Literal["linear", "sqrt", "none"] = key(
        "linear", "how the learning rate follows the rows of a batch", Part())
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = key(
        "dataloader", "in which order samples are packed: as they come, shuffled, or short ones first", Part())
    metrics_path: str | None = key(None, "folder of the lengths of samples, measured there if it is empty", Part())
    verbose: bool = key(False, "print each batch", NotApplicable("a step prints nothing"))

    def check(self) -> None:
        """Raise `ConfigError` for bounds out of order, and without the number of tokens."""
        refuse_disorder(self, "min_batch_size", "max_batch_size")
        refuse_absence(self, "enabled", "max_tokens")


@attrs.frozen
class DataSamplingConfig(Config):
    """`data_sampling`: how batches are drawn from the data set."""

    enabled: bool = key(False, "draw batches by what is below", _UNASKED)
    num_epochs: int = key(1000, "how often the data set is gone through at most", ENABLED, unit="epochs", over=0)
    num_workers: int = key(
        0, "processes of a rank that load samples",
        Elsewhere("fds.data.DistributedLoader(num_workers=)", _WORKERS), unit="processes", low=0,
    )  # fmt: skip
    pin_memory: bool = key(
        False, "load into page-locked memory", Elsewhere("fds.data.DistributedLoader(pin_memory=)"))
    curriculum_learning: CurriculumSamplingConfig = key(CurriculumSamplingConfig, "easy samples first")
    dynamic_batching: DynamicBatchingConfig = key(DynamicBatchingConfig, "batches of about as many tokens")


_LTD = Part("random_ltd.enabled")


@attrs.frozen
class TokensScheduleConfig(Config):
    """The numbers of the schedule of kept tokens."""

    require_steps: int | None = key(None, "when all tokens are kept", _LTD, unit="steps", over=0)
    seq_per_step: int | None = key(
        None, "kept tokens are rounded down to multiples of this", _LTD, unit="tokens", over=0)


@attrs.frozen
class KeptTokensConfig(Config):
    """`random_ltd_schedule`: how many tokens of a sequence the dropping layers compute."""

    min_value: int | None = key(None, "kept at the first step", _LTD, unit="tokens", over=0)
    max_value: int | None = key(None, "kept at the end: the length of sequences", _LTD, unit="tokens", over=0)
    schedule_type: Literal["fixed_linear"] | None = key(None, "how they grow from the least to all", _LTD)
    schedule_config: TokensScheduleConfig = key(TokensScheduleConfig, "the numbers of the schedule")

    def check(self) -> None:
        """Raise `ConfigError` for tokens out of order."""
        refuse_disorder(self, "min_value", "max_value")


@attrs.frozen
class LayerTokenRateConfig(Config):
    """`layer_token_lr_schedule`: a learning rate by tokens computed, not by steps. 0.19.6 refuses it."""

    enabled: bool = key(False, "let the learning rate follow tokens", NotYet("a learning rate by tokens of layers"))
    total_layer_tokens: int | None = key(None, "tokens of all layers in all of the run", Part(), unit="tokens", over=0)
    warmup_type: str | None = key(None, "shape of the warm-up", Part())
    warmup_layer_tokens: int | None = key(None, "tokens of all layers in the warm-up", Part(), unit="tokens", low=0)


@attrs.frozen
class RandomLtdConfig(Config):
    """`random_ltd`: most layers compute a random part of the tokens, which grows to all of them."""

    enabled: bool = key(False, "drop tokens at random in some layers", NotYet("random layerwise token dropping"))
    total_layer_num: int | None = key(None, "layers of the model", Part(), unit="layers", over=0)
    random_ltd_layer_num: int | None = key(None, "layers that drop tokens", Part(), unit="layers", over=0)
    random_ltd_layer_id: tuple[int, ...] | None = key(
        None, "which layers those are: the numbers in their modules' names", Part())
    model_mask_name: str | None = key(None, "argument of a layer that is its attention mask", Part())
    model_type: Literal["encoder", "decoder"] | None = key(
        None, "whether masks are gathered by token or cut to the kept length", Part())
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = key(
        None, "which of rows and tokens is the first dim of what layers pass on", Part())
    random_ltd_schedule: KeptTokensConfig = key(KeptTokensConfig, "how many tokens are kept, by step")
    layer_token_lr_schedule: LayerTokenRateConfig = key(LayerTokenRateConfig, "a learning rate by tokens")

    def check(self) -> None:
        """Raise `ConfigError` where the numbers of layers do not fit."""
        refuse_miscount(self, "random_ltd_layer_num", "random_ltd_layer_id")
        refuse_disorder(self, "random_ltd_layer_num", "total_layer_num")


@attrs.frozen
class DataRoutingConfig(Config):
    """`data_routing`: which tokens go through which layers."""

    enabled: bool = key(False, "route tokens by what is below", _UNASKED)
    random_ltd: RandomLtdConfig = key(RandomLtdConfig, "random layerwise token dropping")


@attrs.frozen
class DataEfficiencyConfig(Config):
    """`data_efficiency`: less data for the same loss."""

    enabled: bool = key(False, "use what is below", _UNASKED)
    seed: int = key(1234, "of what is drawn at random in sampling", Part("data_sampling.curriculum_learning.enabled"))
    data_sampling: DataSamplingConfig = key(DataSamplingConfig, "how batches are drawn")
    data_routing: DataRoutingConfig = key(DataRoutingConfig, "which tokens layers compute")
