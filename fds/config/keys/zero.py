"""ZeRO, where state is offloaded to, and how many ranks share a layer, a sequence or experts.

Sizes are in elements in the JSON and in bytes in fds. Sizes that affect speed and memory only (buckets, prefetch, live
parameters) have fds's own defaults: they are used only if they are given.

Source: DeepSpeed 0.19.6, `runtime/tensor_parallel/config.py` and `module_inject/auto_ep_config.py` for parallelism.
"""

from __future__ import annotations

from typing import Any

from fds.config.field import AUTO, keys
from fds.config.record import Config, within
from fds.config.rows import contradiction, declare
from fds.errors import ConfigError

_TABLE = """
@chunks: n/a: three chunks are under way: one is read, one is updated, one is written
@hooks: n/a: parameters are gathered where the loss uses them; there are no module hooks
@inference: n/a: 0.19.6 reads it for inference only
@pinned: n/a: memory of the host is page-locked for a GPU, in exact sizes; without one it makes no difference

OffloadParamConfig: `offload_param`: offloaded parameters, at stage 3.
    device: Literal["none", "cpu", "nvme"] = "none"; docs "cpu" | where it waits | offload(masters=): cpu: "host", nvme:
        fds.disk(nvme_path)
    nvme_path: str|None = None; docs "/local_nvme" | folder on a fast disk, for nvme | disk(directory=)
    pin_memory: bool = True; docs False | page-locked host memory | @pinned
    buffer_count: int = 5; >= 0 | buffers of the pool | @chunks
    buffer_size: int = 100_000_000; elements; >= 0 | size of each | disk(buffer_bytes=): 4 bytes an element, where that
        is less than its default
    max_in_cpu: int = 1_000_000_000; elements; >= 0 | parameters that stay in host memory under nvme | n/a: parameters
        on a disk are read from it; fds.offload takes patterns of those that stay on the host
    ! folder

OffloadOptimizerConfig [offload(=)]: `offload_optimizer`: offloaded optimizer state, which is updated where it is.
    device: Literal["none", "cpu", "nvme"] = "none"; docs "cpu" | where it waits | (moments=): cpu: "host", nvme:
        fds.disk(nvme_path); gradients too, and masters in 16 bit
    = nvme_path, pin_memory
    buffer_count: int = 4; >= 0 | buffers of the pool, as many as a parameter has states | @chunks
    pipeline_read: bool = False | read the next tile while one is computed | n/a: a chunk is always read ahead and
        written behind
    pipeline_write: bool = False | write the last tile while one is computed | n/a: a chunk is always read ahead and
        written behind
    fast_init: bool = False | begin faster under nvme | n/a: leaves are made where they live
    ratio: float = 1.0; >= 0; <= 1 | share of the state that is offloaded, at stage 3
    super_offload: bool = False | update before the norm of all gradients is known | (speculate=)
    cpuadam_cores_perc: float = 0.8; >= 0; <= 1 | share of the cores that update | n/a: torch.set_num_threads says how
        many cores an update on the host takes
    ! folder

AioConfig [n/a: requests are submitted many at a time, and as earlier ones are done]: `aio`: asynchronous reads and
        writes of offloaded tensors.
    block_size: int = 1_048_576; bytes; > 0 | size of a request | n/a: fds.disk cuts requests itself
    queue_depth: int = 8; > 0 | requests on their way | disk(=): times intra_op_parallelism
    intra_op_parallelism: int = 1; > 0; old thread_count | threads of a request | disk(queue_depth=): times queue_depth
    single_submit: bool = False | send requests one by one
    overlap_events: bool = True | send before earlier requests are done
    use_gds: bool = False | let the disk write into GPU memory | not yet: GPUDirect storage

LeafModuleConfig [@hooks]: `leaf_module`: modules whose parameters stage 3 gathers together.
    classes: tuple[str, ...]|str = ("transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
        "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock") | their classes
    names: tuple[str, ...]|str = () | their names
    name_suffixes: tuple[str, ...]|str = () | ends of their names

ZenFlowConfig [part of zenflow]: `zenflow`: updates of offloaded parameters by importance.
    topk_ratio: float = 0.1; > 0; < 1 | share of gradients that are important
    select_strategy: Literal["auto", "step", "epoch"] = "auto" | what counts time
    select_interval: int|Literal["auto"] = "auto" | time between choices
    update_interval: int|Literal["auto"] = "auto"; >= 1 | updates between those of the unimportant
    overlap_step: bool = False | update while the GPU goes on
    offload: bool = False | keep the important ones' state elsewhere too
    auto_ratio: float = 0.99; >= 0; <= 1 | share of the gradient's norm that chooses for auto
    full_warm_up_rounds: int = 0 | updates of all parameters at first
    pt_reserved_cores_perc: float = 0.5; >= 0; <= 1 | share of the cores for torch
    steps_per_epoch: int|None = None; steps | updates in an epoch

LoCoConfig [part of zeropp_loco_param]: `zeropp_loco_param`: error feedback for quantized gradients.
    err_beta: float|None = None | decay of the running mean of errors; it must be given
    reset_T: int|None = None; steps | updates after which it begins anew; it must be given

ZeroConfig [shard_optimizer(=)]:
    stage: Literal[0, 1, 2, 3] = 0 | what is sharded: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters
    contiguous_gradients: bool = True | copy gradients into one buffer | n/a: gradients are written into flat buckets in
        the first place
    reduce_scatter: bool = True | send each slice to its owner only | n/a: fds has one way of doing this, and it is this
        one or a faster one
    reduce_bucket_size: int = 500_000_000; elements; > 0 | elements reduced in one message | (bucket_bytes=): 4 bytes an
        element; the smaller of the two sizes
    use_multi_rank_bucket_allreduce: bool = True | one message for the slices of several ranks | n/a: fds has one way of
        doing this, and it is this one or a faster one
    allgather_partitions: bool = True | gather parameters instead of broadcasting slices | n/a: fds has one way of doing
        this, and it is this one or a faster one
    allgather_bucket_size: int = 500_000_000; elements; >= 0 | elements gathered in one message | (bucket_bytes=): 4
        bytes an element; the smaller of the two sizes
    overlap_comm: bool|None = None; docs False | reduce while backward goes on; null: at stage 3 | n/a: buckets always
        leave as they are full
    load_from_fp32_weights: bool = True | take master weights from a save's float32 copies | `fds.load(dir, step,
        params)`: saves hold master weights
    elastic_checkpoint: bool = False | load with another number of ranks | `fds.load(dir, step, params)`: every save
        loads on any number of ranks
    offload_param: OffloadParamConfig|None = None; switch cpu_offload_param, cpu_offload_params | keep parameters
        elsewhere
    offload_optimizer: OffloadOptimizerConfig|None = None; switch cpu_offload | keep optimizer state elsewhere
    cpu_offload_use_pin_memory: bool|None = None | page-locked memory for what is offloaded | n/a: memory of the host is
        page-locked for a GPU
    zenflow: ZenFlowConfig|None = None | update offloaded parameters by importance | not yet: ZenFlow
    sub_group_size: int = 1_000_000_000; elements; >= 0; docs 1_000_000_000_000 | elements that the optimizer updates at
        a time, where they are offloaded | disk(buffer_bytes=): 16 bytes an element, where that is less than its default
    stage3_prefetch_bucket_size: int = 50_000_000; elements; >= 0; docs 500_000_000; old prefetch_bucket_size | elements
        gathered ahead of use | (prefetch=): as whole buckets, rounded up
    stage3_param_persistence_threshold: int = 100_000; elements; >= 0; docs 1_000_000; old param_persistence_threshold |
        parameters of at most so many elements stay whole | (persist_below=): and one more
    stage3_model_persistence_threshold: int = 9_223_372_036_854_775_807; elements; >= 0; old model_persistence_threshold
        | elements that may stay whole in all | not yet but for 9223372036854775807: a bound of the parameters that stay
        whole
    stage3_max_live_parameters: int = 1_000_000_000; elements; >= 0; old max_live_parameters | elements that are whole
        at once | (bucket_bytes=): a third of it at most: two are whole, one is on its way
    stage3_max_reuse_distance: int = 1_000_000_000; elements; >= 0; old max_reuse_distance | keep a parameter that is
        used again within so many elements | n/a: buckets stay as long as there is room, in the order of the step before
    stage3_gather_16bit_weights_on_model_save: bool = False; old stage3_gather_fp16_weights_on_model_save,
        gather_16bit_weights_on_model_save | let save_16bit_model gather | `fds.export_weights(dir, state, step)`: it
        always gathers
    stage3_module_granularity_threshold: int = 0; old module_granularity_threshold | gather small modules together |
        @hooks
    stage3_use_all_reduce_for_fetch_params: bool = False; old use_all_reduce_for_fetch_params | gather by summing | n/a:
        fds has one way of doing this, and it is this one or a faster one
    stage3_allgather_sequential: bool = False; old allgather_sequential | gather one parameter at a time | n/a: fds has
        one way of doing this, and it is this one or a faster one
    ignore_unused_parameters: bool = True | let parameters be without a gradient | not yet but for True: an error for
        parameters without a gradient (step.describe(state, batch) lists them)
    legacy_stage1: bool = False | an older stage 1 | not yet: DeepSpeed's older stage 1
    round_robin_gradients: bool = False | spread parameters over ranks in turn | n/a: each rank owns one contiguous
        slice of every bucket
    grad_hooks: bool = True | reduce from hooks at stage 1; documented, and refused by 0.19.6 | n/a: stage 1 reduces
        once a step
    zero_hpz_partition_size: int = 1; >= 0 | at stage 3, ranks that keep a second copy of the parameters among them |
        (secondary=): the axis `dp` of a mesh with `node`; it has so many ranks
    zero_quantized_weights: bool = False | gather parameters as int8, at stage 3 | (weights=):
        `transports.quantized(8)`, by way of `node` where there is one
    zero_quantized_nontrainable_weights: bool = False | keep frozen parameters as int8, at stage 3 | quantize_frozen()
    zero_quantized_gradients: bool = False | reduce gradients as int4, at stage 3 | (gradients=):
        `transports.quantized(4)`, by way of `node` where there is one
    zeropp_loco_param: LoCoConfig|None = None | error feedback for quantized gradients | not yet: LoCo of ZeRO++
    mics_shard_size: int = -1 | ranks among which a copy of the state is sharded; -1: all | `fds.mesh(replicate=-1,
        dp=...)`: dp is this number; a mesh with another is refused
    mics_hierarchical_params_gather: bool = False | gather inside a node, then between nodes | not yet: gathering in two
        hops
    memory_efficient_linear: bool = True | another linear layer at stage 3 | n/a: parameters are let go of and gathered
        again for any layer
    pipeline_loading_checkpoint: bool = False | read a save in turns | n/a: fds has one way of doing this, and it is
        this one or a faster one
    override_module_apply: bool = True | let module.apply see whole parameters | @hooks
    log_trace_cache_warnings: bool = False | say when the order of modules changed | @hooks
    enable_sanity_checks: bool = False | check the engine's own state | n/a: a step has no hidden state
    save_muon_momentum_buffer_in_memory: bool = False | keep Muon's momentum under nvme | n/a: moments of all optimizers
        live where offload_optimizer says
    leaf_module: LeafModuleConfig; null as absent | modules gathered as one
    ! offload

OptimizersUnderZeroConfig: Keys of the top level on optimizers that ZeRO accepts.
    zero_allow_untested_optimizer: bool = False | let any optimizer stand under ZeRO | n/a: an optimizer says itself
        what it needs (whole parameters, norms)
    zero_force_ds_cpu_optimizer: bool = True | demand DeepSpeed's own Adam where state is offloaded | n/a: any
        optimizer's state may live elsewhere

ParallelSizesConfig: Keys of the top level on the layout of ranks.
    data_parallel_size: int|None = None; ranks; > 0 | ranks that take different rows; with the next key it makes the
        mesh | `fds.mesh(dp=...)`
    sequence_parallel_size: int|None = None; ranks; > 0 | ranks that share the tokens of a row | `fds.mesh(sp=...)`:
        over it `fds.context_parallel`; a rank passes its contiguous part of every row
    use_data_before_expert_parallelism: bool = False | let neighbouring ranks differ in data, not in experts |
        `fds.mesh(...)`: neighbours differ in the axis that is named last

TensorParallelRanksConfig [n/a: ranks are those of a mesh, whose axes are passed to transforms]: `tp` of tensor
        parallelism.
    tp_size: int = 1; ranks; > 0 | ranks that share a layer, as checked against `autotp_size` | part of autotp_size
    tp_grain_size: int = 1; elements; > 0 | slices of a layer are multiples of this | @inference
    mpu: Any = None | object that knows the groups of ranks
    tp_group: Any = None | group of the ranks that share a layer

TensorRuleConfig [part of partition_config]: One of `layer_specs`: how parameters with matching names are split.
    patterns: tuple[str, ...] = () | regular expressions for names of parameters
    partition_type: Literal["column", "row", "skip"] = "column" | share outputs, share inputs, or give each rank all
    shape: Any = None | the parameter is viewed so first; -1 is inferred, a list in a list is of uneven parts
    partition_dim: int|None = None; >= 0 | dim of that which is shared; null: 0 for column, 1 for row
    model_types: tuple[str, ...]|None = None | architectures that the rule is for; null: all
    gather_output: bool = False | give each rank all outputs
    grad_allreduce: bool = False | sum gradients of what each rank has all of

TensorPartitionConfig [part of partition_config]: `partition_config`: which dim of which parameter is split.
    use_default_specs: bool = True | add these to the preset's rules, not replace them
    layer_specs: tuple[dict[str, Any], ...] = () | rules, the first that matches a parameter counts; each has the keys
        of `TensorRuleConfig`
    tp_size: int = 1; > 0 | nothing: `autotp_size` replaces it | n/a: `autotp_size` replaces it
    embedding_partition_dim: int = 1 | dim of an embedding that is shared
    lm_head_patterns: tuple[str, ...] = ("lm_head", "embed_out") | names of the output layer
    strict_mode: bool = False | refuse linear layers that no rule is for
    ! rules

TensorParallelConfig [@inference]:
    autotp_size: int = 0; ranks; >= 0 | ranks that share a layer; 0 and 1: none | tensor_parallel(): over mesh["tp"], by
        the plan "auto"
    tp_overlap_comm: bool = False | send while computing | tensor_parallel(overlap=): true is 1, the same bits
    tp: TensorParallelRanksConfig; old tensor_parallel | the ranks that share a layer
    preset_model: str|None = None | architecture whose rules are built in | n/a: a plan follows from the modules
        themselves; those that are not known are refused
    partition_config: TensorPartitionConfig|None = None | rules of one's own | not yet but for None: rules of one's own,
        which fds.tensor_parallel takes as a plan
    dtype: Literal["torch.float16"] = "torch.float16" | type of the sliced parameters
    injection_policy_tuple: tuple[Any, ...]|None = None | modules whose output is summed
    keep_module_on_host: bool = False | slice in the host's memory
    kernel_inject: bool = False; old replace_with_kernel_inject | use inference kernels
    ! sizes

ExpertParallelConfig: `expert_parallel`: layers of experts are found in a model, and the experts shared among ranks.
    enabled: bool = False | share experts among ranks | not yet: expert parallelism
    autoep_size: int = 1; ranks; > 0 | ranks that share the experts of a layer
    expert_tensor_parallel_size: int = 1; ranks; > 0 | ranks that share one expert
    validate_folding_routing: bool = False | check at each step that ranks agree on tokens
    preset_model: str|None = None | architecture whose names are built in
    moe_layer_pattern: str|None = None | regular expression for layers of experts
    expert_pattern: str|None = None | attribute of such a layer that holds the experts
    router_pattern: str|None = None | attribute that holds the router
    use_grouped_mm: bool = True | multiply all experts at once
    disable_triton_grouped_mm: bool = False | without Triton
    route_norm: bool|None = None | let the weights of a token's experts sum to one; null: as the preset
    route_scale: float = 1.0 | factor of the experts' output
    score_apply: Literal["auto", "pre", "post"] = "auto" | scale what experts take, or what they give
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm"] = "auto" | how outputs are added
    num_expert_groups: int|None = None; > 0 | groups of experts that are routed to as one
    num_limited_groups: int|None = None; > 0 | groups that a token may go to
    score_func: Literal["auto", "softmax", "sigmoid"] = "auto" | how scores become weights
    top_k: int = "auto"; > 0 | experts that compute a token
    load_balance_coeff: float|None = None | weight of an auxiliary loss; 0.19.6 takes null only
    routed_scaling_factor: float = "auto" | factor of routed experts' output
    expert_w1: str|None = None | name of an expert's first weight; null: as the preset
    expert_w2: str|None = None | name of its second
    expert_w3: str|None = None | name of its third; absent: as the preset; null, given: the first holds it too
    num_experts_attr: str|None = None | attribute of the model's config that counts experts
    top_k_attr: str|None = None | attribute of the model's config for top_k
    has_shared_experts: bool|None = None | whether some experts compute all tokens
    shared_experts_pattern: str|None = None | attribute that holds those
    shared_experts_gate_pattern: str|None = None | attribute that weighs them
    ! order num_limited_groups num_expert_groups
    ! loss
"""


class ZeroConfig(Config):
    """`zero_optimization`: sharding of optimizer state (1), gradients (2) and parameters (3) between the data ranks."""


class TensorParallelConfig(Config):
    """`tensor_parallel`: layers are split by name."""

    @property
    def enabled(self) -> bool:
        """Whether layers are split."""
        return self.autotp_size == AUTO or self.autotp_size > 1


def _switch(on: Any) -> dict[str, str] | None:
    """Convert an old boolean to its group. Raises `ConfigError` for another type."""
    if on is not None and not isinstance(on, bool):
        raise ConfigError("a value has the wrong type", got=repr(on)[:80], want="true or false")
    return {"device": "cpu"} if on else None


def _check_folder(config: Any) -> None:
    if config["device"] == "nvme" and config["nvme_path"] is None:
        raise ConfigError(
            "nvme needs a folder", where="device, nvme_path", got="nvme, null", want='"nvme_path": "/a/folder"'
        )


def _check_offload(config: Any) -> None:
    if config.stage == AUTO:
        return
    optimizer, param = config.offload_optimizer, config.offload_param
    if param is not None and param.device not in ("none", AUTO) and config.stage != 3:
        raise ConfigError(
            "parameters can be offloaded at stage 3 only",
            where="stage, offload_param.device",
            got=f"stage {config.stage}, {param.device}",
            want='"stage": 3',
        )
    if optimizer is None or optimizer.device in ("none", AUTO):
        return
    if config.stage == 0 or (optimizer.device == "nvme" and config.stage < 3):
        want = '"stage": 3' if optimizer.device == "nvme" else '"stage": 1, 2 or 3'
        raise ConfigError(
            "optimizer state can be offloaded from stage 1 on, to a disk at stage 3 only",
            where="stage, offload_optimizer.device",
            got=f"stage {config.stage}, {optimizer.device}",
            want=want,
        )
    if optimizer.ratio != AUTO and optimizer.ratio < 1 and config.stage < 3:
        raise ConfigError(
            "a part of the state can be offloaded at stage 3 only",
            where="stage, offload_optimizer.ratio",
            got=f"stage {config.stage}, {optimizer.ratio}",
            want='"stage": 3',
        )


def _check_rules(config: Any) -> None:
    for i, rule in enumerate(() if config.layer_specs == AUTO else config.layer_specs):
        with within(f"layer_specs.{i}."):
            _RECORDS["TensorRuleConfig"].from_dict(rule)


def _check_sizes(config: Any) -> None:
    auto, size = config.autotp_size, config.tp.tp_size
    if AUTO not in (auto, size) and size > 1 and auto != size:
        want = "the same number, or autotp_size alone"
        raise contradiction(config, "a layer is shared by one number of ranks", "autotp_size", "tp.tp_size", want=want)


def _check_loss(config: Any) -> None:
    if config.load_balance_coeff not in (None, AUTO):
        got = repr(config.load_balance_coeff)
        raise ConfigError("0.19.6 has no auxiliary loss", where="load_balance_coeff", got=got, want="null")


_RECORDS = declare(globals(), _TABLE)
STAGE_3 = frozenset(  # no effect at other stages, as in 0.19.6
    f"zero_optimization.{name}"
    for name in keys(ZeroConfig)
    if name.startswith("stage3_") or name == "zero_quantized_nontrainable_weights"
)
