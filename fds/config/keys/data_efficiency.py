"""Data efficiency: the samples of a batch, and the tokens that layers compute.

In 0.19.6 each technique has its own switch (`curriculum_learning.enabled`, `dynamic_batching.enabled`,
`random_ltd.enabled`); the switches of the groups around them are read but not used.

Source: `runtime/data_pipeline/` of DeepSpeed 0.19.6.
"""

from __future__ import annotations

from typing import Literal

import attrs

from fds.config.contradiction import check_length, check_needed, check_order
from fds.config.field import key
from fds.config.keys.curriculum import ENABLED, CurriculumScheduleConfig, ScheduleType, check_schedule
from fds.config.meaning import Elsewhere, NotApplicable, NotYet, PartOf
from fds.config.record import Config

_UNUSED = NotApplicable("the switches of the techniques below it decide, in 0.19.6 too")
_WORKERS = "the loader of all batches has one number of workers"


@attrs.frozen
class CurriculumMetricConfig(Config):
    """One metric of difficulty: files written by the analysis of the data, and a schedule."""

    index_to_sample_path: str | None = key(None, "file of the samples in the order of difficulty", ENABLED)
    index_to_metric_path: str | None = key(None, "file of the difficulties in that order", ENABLED)
    difficulty_type: Literal["value", "percentile"] | None = key(
        None, "whether difficulties are values of the measure or hundredths of all samples", ENABLED
    )
    clustering_type: Literal["schedule_based", "single_cluster"] | None = key(
        None, "draw from clusters that grow by the schedule, or from all, which the program then eases", ENABLED
    )
    min_difficulty: int | None = key(None, "greatest difficulty that is let through at first", ENABLED)
    max_difficulty: int | None = key(None, "greatest difficulty from the end of the schedule on", ENABLED)
    schedule_type: ScheduleType | None = key(None, "how the difficulty grows from the least to the greatest", ENABLED)
    schedule_config: CurriculumScheduleConfig = key(CurriculumScheduleConfig, "the numbers of the schedule")

    def check(self) -> None:
        """Raise `ConfigError` for difficulties out of order."""
        check_schedule(self)


@attrs.frozen
class CurriculumSamplingConfig(Config):
    """`curriculum_learning` of data sampling: batches are drawn from the samples that all metrics allow."""

    enabled: bool = key(False, "draw easy samples first", NotYet("curriculum learning by metrics of the samples"))
    data_cluster_path: str | None = key(None, "folder for the indices of samples of like difficulty", PartOf())
    curriculum_metrics: dict[str, CurriculumMetricConfig] = key(dict, "measures of difficulty, by name", PartOf())

    def check(self) -> None:
        """Raise `ConfigError` for a curriculum without a metric."""
        check_needed(self, "enabled", "curriculum_metrics")


@attrs.frozen
class DynamicBatchingConfig(Config):
    """`dynamic_batching` of data sampling: batches with about the same number of tokens, not of rows."""

    enabled: bool = key(False, "fill batches by tokens", NotYet("batches of a number of tokens"))
    max_tokens: int | None = key(None, "tokens that a microbatch may have at most", PartOf(), unit="tokens", over=0)
    min_batch_size: int = key(1, "rows that a microbatch must have at least", PartOf(), unit="rows", low=0)
    max_batch_size: int | None = key(
        None, "rows that a microbatch may have at most", PartOf(), unit="rows", over=0, null=False
    )
    lr_scaling_method: Literal["linear", "sqrt", "none"] = key(
        "linear", "how the learning rate follows the rows of a batch", PartOf()
    )
    sequence_picking_order: Literal["dataloader", "random", "seqlen"] = key(
        "dataloader", "in which order samples are packed: as they come, shuffled, or short ones first", PartOf()
    )
    metrics_path: str | None = key(None, "folder of the lengths of samples, measured there if it is empty", PartOf())
    verbose: bool = key(False, "print each batch", NotApplicable("a step prints nothing"))

    def check(self) -> None:
        """Raise `ConfigError` for bounds out of order, or if the number of tokens is missing."""
        check_order(self, "min_batch_size", "max_batch_size")
        check_needed(self, "enabled", "max_tokens")


@attrs.frozen
class DataSamplingConfig(Config):
    """`data_sampling`: how batches are drawn from the data set."""

    enabled: bool = key(False, "draw batches by what is below", _UNUSED)
    num_epochs: int = key(1000, "how often the data set is gone through at most", ENABLED, unit="epochs", over=0)
    num_workers: int = key(
        0,
        "processes of a rank that load samples",
        Elsewhere("fds.data.DistributedLoader(num_workers=)", _WORKERS),
        unit="processes",
        low=0,
    )
    pin_memory: bool = key(False, "load into page-locked memory", Elsewhere("fds.data.DistributedLoader(pin_memory=)"))
    curriculum_learning: CurriculumSamplingConfig = key(CurriculumSamplingConfig, "easy samples first")
    dynamic_batching: DynamicBatchingConfig = key(DynamicBatchingConfig, "batches of about as many tokens")


_LTD = PartOf("random_ltd.enabled")


@attrs.frozen
class TokensScheduleConfig(Config):
    """The numbers of the schedule of kept tokens."""

    require_steps: int | None = key(None, "when all tokens are kept", _LTD, unit="steps", over=0)
    seq_per_step: int | None = key(
        None, "kept tokens are rounded down to multiples of this", _LTD, unit="tokens", over=0
    )


@attrs.frozen
class KeptTokensConfig(Config):
    """`random_ltd_schedule`: how many tokens of a sequence the dropping layers compute."""

    min_value: int | None = key(None, "kept at the first step", _LTD, unit="tokens", over=0)
    max_value: int | None = key(None, "kept at the end: the length of sequences", _LTD, unit="tokens", over=0)
    schedule_type: Literal["fixed_linear"] | None = key(None, "how they grow from the least to all", _LTD)
    schedule_config: TokensScheduleConfig = key(TokensScheduleConfig, "the numbers of the schedule")

    def check(self) -> None:
        """Raise `ConfigError` for bounds out of order."""
        check_order(self, "min_value", "max_value")


@attrs.frozen
class LayerTokenRateConfig(Config):
    """`layer_token_lr_schedule`: a learning rate by computed tokens, not by steps. 0.19.6 refuses it."""

    enabled: bool = key(False, "let the learning rate follow tokens", NotYet("a learning rate by tokens of layers"))
    total_layer_tokens: int | None = key(
        None, "tokens of all layers in all of the run", PartOf(), unit="tokens", over=0
    )
    warmup_type: str | None = key(None, "shape of the warm-up", PartOf())
    warmup_layer_tokens: int | None = key(None, "tokens of all layers in the warm-up", PartOf(), unit="tokens", low=0)


@attrs.frozen
class RandomLtdConfig(Config):
    """`random_ltd`: most layers compute a random subset of the tokens, which grows to all of them."""

    enabled: bool = key(False, "drop tokens at random in some layers", NotYet("random layerwise token dropping"))
    total_layer_num: int | None = key(None, "layers of the model", PartOf(), unit="layers", over=0)
    random_ltd_layer_num: int | None = key(None, "layers that drop tokens", PartOf(), unit="layers", over=0)
    random_ltd_layer_id: tuple[int, ...] | None = key(
        None, "which layers those are: the numbers in their modules' names", PartOf()
    )
    model_mask_name: str | None = key(None, "argument of a layer that is its attention mask", PartOf())
    model_type: Literal["encoder", "decoder"] | None = key(
        None, "whether masks are gathered by token or cut to the kept length", PartOf()
    )
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = key(
        None, "which of rows and tokens is the first dim of what layers pass on", PartOf()
    )
    random_ltd_schedule: KeptTokensConfig = key(KeptTokensConfig, "how many tokens are kept, by step")
    layer_token_lr_schedule: LayerTokenRateConfig = key(LayerTokenRateConfig, "a learning rate by tokens")

    def check(self) -> None:
        """Raise `ConfigError` if the numbers of layers do not match."""
        check_length(self, "random_ltd_layer_num", "random_ltd_layer_id")
        check_order(self, "random_ltd_layer_num", "total_layer_num")


@attrs.frozen
class DataRoutingConfig(Config):
    """`data_routing`: which tokens go through which layers."""

    enabled: bool = key(False, "route tokens by what is below", _UNUSED)
    random_ltd: RandomLtdConfig = key(RandomLtdConfig, "random layerwise token dropping")


@attrs.frozen
class DataEfficiencyConfig(Config):
    """`data_efficiency`: less data for the same loss."""

    enabled: bool = key(False, "use what is below", _UNUSED)
    seed: int = key(1234, "of what is drawn at random in sampling", PartOf("data_sampling.curriculum_learning.enabled"))
    data_sampling: DataSamplingConfig = key(DataSamplingConfig, "how batches are drawn")
    data_routing: DataRoutingConfig = key(DataRoutingConfig, "which tokens layers compute")
