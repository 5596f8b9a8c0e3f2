"""ZeRO: what is sharded between the data ranks, and the sizes of messages.

Sizes are in elements in the JSON and in bytes in fds. Sizes that affect speed and memory only (buckets, prefetch, live
parameters) have fds's own defaults: they are used only if they are given.
"""

from __future__ import annotations

from typing import Any, Literal

import attrs

from fds.config.field import AUTO, key, keys
from fds.config.keys.offload import OffloadOptimizerConfig, OffloadParamConfig
from fds.config.meaning import Elsewhere, NotApplicable, NotYet, PartOf, argument
from fds.config.record import Config
from fds.errors import ConfigError

_ONE_WAY = NotApplicable("fds has one way of doing this, and it is this one or a faster one")
_BUCKET = argument("shard_optimizer", name="bucket_bytes", note="4 bytes an element; the smaller of the two sizes")
_NO_HOOKS = NotApplicable("parameters are gathered where the loss uses them; there are no module hooks")
_MAX = 2**63 - 1
_ZENFLOW, _LOCO = PartOf("zenflow"), PartOf("zeropp_loco_param")


def _offload_to_cpu(on: Any) -> dict[str, str] | None:
    """Convert an old boolean to its group. Raises `ConfigError` for another type."""
    if on is not None and not isinstance(on, bool):
        raise ConfigError("a value has the wrong type", got=repr(on)[:80], want="true or false")
    return {"device": "cpu"} if on else None


@attrs.frozen
class LeafModuleConfig(Config):
    """`leaf_module`: modules whose parameters stage 3 gathers together."""

    classes: tuple[str, ...] | str = key(
        (
            "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
            "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ),
        "their classes",
        _NO_HOOKS,
    )
    names: tuple[str, ...] | str = key((), "their names", _NO_HOOKS)
    name_suffixes: tuple[str, ...] | str = key((), "ends of their names", _NO_HOOKS)


@attrs.frozen
class ZenFlowConfig(Config):
    """`zenflow`: updates of offloaded parameters by importance."""

    topk_ratio: float = key(0.1, "share of gradients that are important", _ZENFLOW, over=0, under=1)
    select_strategy: Literal["auto", "step", "epoch"] = key("auto", "what counts time", _ZENFLOW)
    select_interval: int | Literal["auto"] = key("auto", "time between choices", _ZENFLOW)
    update_interval: int | Literal["auto"] = key("auto", "updates between those of the unimportant", _ZENFLOW, low=1)
    overlap_step: bool = key(False, "update while the GPU goes on", _ZENFLOW)
    offload: bool = key(False, "keep the important ones' state elsewhere too", _ZENFLOW)
    auto_ratio: float = key(0.99, "share of the gradient's norm that chooses for auto", _ZENFLOW, low=0, high=1)
    full_warm_up_rounds: int = key(0, "updates of all parameters at first", _ZENFLOW)
    pt_reserved_cores_perc: float = key(0.5, "share of the cores for torch", _ZENFLOW, low=0, high=1)
    steps_per_epoch: int | None = key(None, "updates in an epoch", _ZENFLOW, unit="steps")


@attrs.frozen
class LoCoConfig(Config):
    """`zeropp_loco_param`: error feedback for quantized gradients."""

    err_beta: float | None = key(None, "decay of the running mean of errors; it must be given", _LOCO)
    reset_T: int | None = key(None, "updates after which it begins anew; it must be given", _LOCO, unit="steps")


@attrs.frozen
class ZeroConfig(Config):
    """`zero_optimization`: sharding of optimizer state (1), gradients (2) and parameters (3) between the data ranks."""

    stage: Literal[0, 1, 2, 3] = key(
        0,
        "what is sharded: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters",
        argument("shard_optimizer", name="stage"),
    )
    contiguous_gradients: bool = key(
        True,
        "copy gradients into one buffer",
        NotApplicable("gradients are written into flat buckets in the first place"),
    )
    reduce_scatter: bool = key(True, "send each slice to its owner only", _ONE_WAY)
    reduce_bucket_size: int = key(500_000_000, "elements reduced in one message", _BUCKET, unit="elements", over=0)
    use_multi_rank_bucket_allreduce: bool = key(True, "one message for the slices of several ranks", _ONE_WAY)
    allgather_partitions: bool = key(True, "gather parameters instead of broadcasting slices", _ONE_WAY)
    allgather_bucket_size: int = key(500_000_000, "elements gathered in one message", _BUCKET, unit="elements", low=0)
    overlap_comm: bool | None = key(
        None,
        "reduce while backward goes on; null: at stage 3",
        NotApplicable("buckets always leave as they are full"),
        documented=False,
    )
    load_from_fp32_weights: bool = key(
        True,
        "take master weights from a save's float32 copies",
        Elsewhere("fds.load(dir, step, params)", "saves hold master weights"),
    )
    elastic_checkpoint: bool = key(
        False,
        "load with another number of ranks",
        Elsewhere("fds.load(dir, step, params)", "every save loads on any number of ranks"),
    )
    offload_param: OffloadParamConfig | None = key(
        None,
        "keep parameters elsewhere",
        None,
        old={"cpu_offload_param": _offload_to_cpu, "cpu_offload_params": _offload_to_cpu},
    )
    offload_optimizer: OffloadOptimizerConfig | None = key(
        None, "keep optimizer state elsewhere", None, old={"cpu_offload": _offload_to_cpu}
    )
    cpu_offload_use_pin_memory: bool | None = key(
        None, "page-locked memory for what is offloaded", NotApplicable("memory of the host is page-locked for a GPU")
    )
    zenflow: ZenFlowConfig | None = key(None, "update offloaded parameters by importance", NotYet("ZenFlow"))
    sub_group_size: int = key(
        1_000_000_000,
        "elements that the optimizer updates at a time, where they are offloaded",
        argument("disk", name="buffer_bytes", note="16 bytes an element, where that is less than its default"),
        unit="elements",
        documented=1_000_000_000_000,
        low=0,
    )
    stage3_prefetch_bucket_size: int = key(
        50_000_000,
        "elements gathered ahead of use",
        argument("shard_optimizer", name="prefetch", note="as whole buckets, rounded up"),
        unit="elements",
        documented=500_000_000,
        low=0,
        old=("prefetch_bucket_size",),
    )
    stage3_param_persistence_threshold: int = key(
        100_000,
        "parameters of at most so many elements stay whole",
        argument("shard_optimizer", name="persist_below", note="and one more"),
        unit="elements",
        documented=1_000_000,
        low=0,
        old=("param_persistence_threshold",),
    )
    stage3_model_persistence_threshold: int = key(
        _MAX,
        "elements that may stay whole in all",
        NotYet("a bound of the parameters that stay whole", nothing=(_MAX,)),
        unit="elements",
        low=0,
        old=("model_persistence_threshold",),
    )
    stage3_max_live_parameters: int = key(
        1_000_000_000,
        "elements that are whole at once",
        argument(
            "shard_optimizer", name="bucket_bytes", note="a third of it at most: two are whole, one is on its way"
        ),
        unit="elements",
        low=0,
        old=("max_live_parameters",),
    )
    stage3_max_reuse_distance: int = key(
        1_000_000_000,
        "keep a parameter that is used again within so many elements",
        NotApplicable("buckets stay as long as there is room, in the order of the step before"),
        unit="elements",
        low=0,
        old=("max_reuse_distance",),
    )
    stage3_gather_16bit_weights_on_model_save: bool = key(
        False,
        "let save_16bit_model gather",
        Elsewhere("fds.export_weights(dir, state, step)", "it always gathers"),
        old=("stage3_gather_fp16_weights_on_model_save", "gather_16bit_weights_on_model_save"),
    )
    stage3_module_granularity_threshold: int = key(
        0, "gather small modules together", _NO_HOOKS, old=("module_granularity_threshold",)
    )
    stage3_use_all_reduce_for_fetch_params: bool = key(
        False, "gather by summing", _ONE_WAY, old=("use_all_reduce_for_fetch_params",)
    )
    stage3_allgather_sequential: bool = key(
        False, "gather one parameter at a time", _ONE_WAY, old=("allgather_sequential",)
    )
    ignore_unused_parameters: bool = key(
        True,
        "let parameters be without a gradient",
        NotYet("an error for parameters without a gradient (step.describe(state, batch) lists them)", nothing=(True,)),
    )
    legacy_stage1: bool = key(False, "an older stage 1", NotYet("DeepSpeed's older stage 1"))
    round_robin_gradients: bool = key(
        False,
        "spread parameters over ranks in turn",
        NotApplicable("each rank owns one contiguous slice of every bucket"),
    )
    grad_hooks: bool = key(
        True,
        "reduce from hooks at stage 1; documented, and refused by 0.19.6",
        NotApplicable("stage 1 reduces once a step"),
    )
    zero_hpz_partition_size: int = key(
        1,
        "at stage 3, ranks that keep a second copy of the parameters among them",
        argument("shard_optimizer", name="secondary", note="the axis `dp` of a mesh with `node`; it has so many ranks"),
        low=0,
    )
    zero_quantized_weights: bool = key(
        False,
        "gather parameters as int8, at stage 3",
        argument(
            "shard_optimizer", name="weights", note="`transports.quantized(8)`, by way of `node` where there is one"
        ),
    )
    zero_quantized_nontrainable_weights: bool = key(
        False, "keep frozen parameters as int8, at stage 3", argument("quantize_frozen")
    )
    zero_quantized_gradients: bool = key(
        False,
        "reduce gradients as int4, at stage 3",
        argument(
            "shard_optimizer", name="gradients", note="`transports.quantized(4)`, by way of `node` where there is one"
        ),
    )
    zeropp_loco_param: LoCoConfig | None = key(None, "error feedback for quantized gradients", NotYet("LoCo of ZeRO++"))
    mics_shard_size: int = key(
        -1,
        "ranks among which a copy of the state is sharded; -1: all",
        Elsewhere("fds.mesh(replicate=-1, dp=...)", "dp is this number; a mesh with another is refused"),
    )
    mics_hierarchical_params_gather: bool = key(
        False, "gather inside a node, then between nodes", NotYet("gathering in two hops")
    )
    memory_efficient_linear: bool = key(
        True,
        "another linear layer at stage 3",
        NotApplicable("parameters are let go of and gathered again for any layer"),
    )
    pipeline_loading_checkpoint: bool = key(False, "read a save in turns", _ONE_WAY)
    override_module_apply: bool = key(True, "let module.apply see whole parameters", _NO_HOOKS)
    log_trace_cache_warnings: bool = key(False, "say when the order of modules changed", _NO_HOOKS)
    enable_sanity_checks: bool = key(False, "check the engine's own state", NotApplicable("a step has no hidden state"))
    save_muon_momentum_buffer_in_memory: bool = key(
        False,
        "keep Muon's momentum under nvme",
        NotApplicable("moments of all optimizers live where offload_optimizer says"),
    )
    leaf_module: LeafModuleConfig = key(LeafModuleConfig, "modules gathered as one", None, null=True)

    def check(self) -> None:
        """Raise `ConfigError` for offloading at a stage that does not support it."""
        if self.stage != AUTO:
            self._check_offload()

    def _check_offload(self) -> None:
        optimizer, param = self.offload_optimizer, self.offload_param
        if param is not None and param.device not in ("none", AUTO) and self.stage != 3:
            raise ConfigError(
                "parameters can be offloaded at stage 3 only",
                where="stage, offload_param.device",
                got=f"stage {self.stage}, {param.device}",
                want='"stage": 3',
            )
        if optimizer is None or optimizer.device in ("none", AUTO):
            return
        if self.stage == 0 or (optimizer.device == "nvme" and self.stage < 3):
            want = '"stage": 3' if optimizer.device == "nvme" else '"stage": 1, 2 or 3'
            raise ConfigError(
                "optimizer state can be offloaded from stage 1 on, to a disk at stage 3 only",
                where="stage, offload_optimizer.device",
                got=f"stage {self.stage}, {optimizer.device}",
                want=want,
            )
        if optimizer.ratio != AUTO and optimizer.ratio < 1 and self.stage < 3:
            raise ConfigError(
                "a part of the state can be offloaded at stage 3 only",
                where="stage, offload_optimizer.ratio",
                got=f"stage {self.stage}, {optimizer.ratio}",
                want='"stage": 3',
            )


STAGE_3 = frozenset(  # no effect at other stages, as in 0.19.6
    f"zero_optimization.{name}"
    for name in keys(ZeroConfig)
    if name.startswith("stage3_") or name == "zero_quantized_nontrainable_weights"
)


@attrs.frozen
class OptimizersUnderZeroConfig(Config):
    """Keys of the top level on optimizers that ZeRO accepts."""

    zero_allow_untested_optimizer: bool = key(
        False,
        "let any optimizer stand under ZeRO",
        NotApplicable("an optimizer says itself what it needs (whole parameters, norms)"),
    )
    zero_force_ds_cpu_optimizer: bool = key(
        True,
        "demand DeepSpeed's own Adam where state is offloaded",
        NotApplicable("any optimizer's state may live elsewhere"),
    )
