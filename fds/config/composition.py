"""From a configuration to the calls of fds that compose its step, in the order of the stations that they fill."""

from __future__ import annotations

import glob
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fds.config import compression
from fds.config.function_call import (
    SUMS,
    AxisOf,
    FunctionCall,
    Name,
    beside_sums,
    default,
    difficulty_call,
    optimizer_call,
    random_ltd_call,
    schedule_call,
)
from fds.config.keys import Groups
from fds.config.keys.step import DTYPES
from fds.config.modules import Parts
from fds.config.offload import offload_call
from fds.config.unsupported import check_supported
from fds.errors import ConfigError, MeshError
from fds.layout import MOST_BYTES

_GRAD_SCALER = {"window": 2000, "hysteresis": 1}  # as in torch.amp.GradScaler and Apex, not DeepSpeed's fp16
AXES = ("dp", "node", "replicate", "pp", "sp", "tp")  # of a mesh; rows differ along the first three
EMBEDDINGS = "*embed*"  # a pattern where there is no module to read the names from


def calls(
    config: Groups, axes: Mapping[str, int], embeddings: Sequence[str] | None = None, parts: Parts | None = None
) -> tuple[FunctionCall, ...]:
    """Return the calls for a mesh, and for embeddings and modules of these names; None where nobody knows them.

    Raises `NotSupportedError`, `ConfigError`, and `MeshError` for a mesh without `dp`.
    """
    check_supported(config)
    composed, config = compose_supported(config, axes, (EMBEDDINGS,) if embeddings is None else embeddings, parts)
    if parts is None and (key := compression.asks_for_modules(config)):
        raise ConfigError(
            "nobody knows which modules are meant",
            where=key,
            got="true, without a module",
            want="fds.initialize(module, ...), or config.transforms(mesh, model=module)",
        )
    if embeddings is None and _sends_rows(config):
        raise ConfigError(
            "nobody knows which parameters are embeddings",
            where="sparse_gradients",
            got="true, without a module",
            want="fds.initialize(module, ...), or config.transforms(mesh, model=module)",
            hint="of Layers leave the key out, and compose by hand, with "
            f"fds.shard_optimizer(..., gradients={{{EMBEDDINGS!r}: fds.transports.rows()}})",
        )
    return composed


def compose_supported(
    config: Groups, axes: Mapping[str, int], embeddings: Sequence[str] = (EMBEDDINGS,), parts: Parts | None = None
) -> tuple[tuple[FunctionCall, ...], Groups]:
    """Return the calls for the keys that fds supports, and the resolved configuration."""
    config = config.resolve(world_size=data_ranks(axes))
    _check_sizes(config, axes)
    optional = (
        _curriculum(config, axes),
        _microbatches(config, axes),
        _sharding(config, axes, embeddings),
        FunctionCall("context_parallel", (AxisOf("sp"),)) if axes.get("sp", 1) > 1 else None,
        _tensor_parallel(config),
        _frozen_weights(config),
        *compression.pruning(config, parts, "l1"),  # of weights as they are, which are rounded then
        *compression.weight_quantization(config, parts),
        *compression.pruning(config, parts, "topk"),
        *compression.by_sensitivity(config, parts),
        _precision(config, axes),
        offload_call(config, low=compute_dtype(config) != torch.float32),
        _autocast(config),
        _recomputation(config, axes),
        _kept_tokens(config),
        _layer_drop(config),  # after what joins layers, to be given single ones
        *compression.activation_quantization(config, parts),
        loss_scale_call(config),
        _finite(config),
        _profile(config),
        clipping_call(config),
        _optimizer(config),
    )
    return tuple(call for call in optional if call is not None), config


def _optimizer(config: Groups) -> FunctionCall | None:
    call = optimizer_call(config)
    return FunctionCall("by_name", (beside_sums(call),)) if call and compression.sums_scores(config) else call


def _check_sizes(config: Groups, axes: Mapping[str, int]) -> None:
    zero, in_node = config.zero_optimization, axes["dp"] * axes.get("sp", 1)
    slices = in_node * axes.get("node", 1)
    shards, secondary = (zero.mics_shard_size, zero.zero_hpz_partition_size) if zero.stage == 3 else (0, 0)
    tensor, elastic = config.tensor_parallel, config.elasticity
    copy = elastic.model_parallel_size if elastic.enabled and elastic.model_parallel_size > 1 else None
    for key, size, of_mesh in (
        ("data_parallel_size", config.parallel_sizes.data_parallel_size, data_ranks(axes)),
        ("sequence_parallel_size", config.parallel_sizes.sequence_parallel_size, axes.get("sp", 1)),
        ("tensor_parallel.autotp_size", tensor.autotp_size if tensor.enabled else None, axes.get("tp", 1)),
        ("pipeline.stages", config.pipeline.stages, axes.get("pp", 1)),
        ("elasticity.model_parallel_size", copy, math.prod(axes.values()) // data_ranks(axes)),
        ("zero_optimization.mics_shard_size", max(shards, 0) or None, slices),
        ("zero_optimization.zero_hpz_partition_size", min(secondary, slices) if secondary > 1 else None, in_node),
    ):
        if isinstance(size, int) and size != of_mesh:
            raise ConfigError(
                "the mesh has another size",
                where=key,
                got=f"{size}, and the mesh has {of_mesh}",
                want="fds.mesh(pp=stages, replicate=copies, node=nodes, dp=shards of a node, sp=ranks that share rows, "
                "tp=ranks that share layers)",
            )


def data_ranks(axes: Mapping[str, int]) -> int:
    """Return the number of ranks that have different batches."""
    if not isinstance(axes, Mapping) or not all(type(n) is int and n > 0 for n in axes.values()):
        raise MeshError("not sizes of axes", got=repr(axes)[:80], want='fds.mesh(dp=-1), or {"dp": 8}')
    if "dp" not in axes:
        raise MeshError(
            "the mesh has no axis for data ranks", got=", ".join(axes) or "no axes", want='"dp"', hint="fds.mesh(dp=-1)"
        )
    other = [name for name, size in axes.items() if name not in AXES and size > 1]
    if other:
        raise MeshError("a configuration does not use these axes", got=", ".join(other), want=", ".join(AXES))
    return axes["dp"] * axes.get("node", 1) * axes.get("replicate", 1)


def axes_of(config: Groups, ranks: int) -> dict[str, int]:
    """Return the sizes of the axes of a mesh, as the configuration says it: neighbours share layers, then rows.

    The other ranks are data ranks, in nodes where hpZ says of how many. Raises `ConfigError` for a number of ranks that
    the sizes do not divide.
    """
    zero, tensor = config.zero_optimization, max(config.tensor_parallel.autotp_size, 1)
    sequence = config.parallel_sizes.sequence_parallel_size or 1
    if ranks % (tensor * sequence):
        raise ConfigError(
            "the ranks cannot be divided into those that share layers and rows",
            where="tensor_parallel.autotp_size, sequence_parallel_size",
            got=f"{tensor} and {sequence}, on {ranks} ranks",
            want="sizes whose product divides the number of ranks",
        )
    slices = ranks // tensor
    size = zero.zero_hpz_partition_size if zero.stage == 3 and zero.zero_hpz_partition_size % sequence == 0 else 0
    in_nodes = 1 < size < slices and slices % size == 0
    data = {"node": slices // size, "dp": size // sequence} if in_nodes else {"dp": slices // sequence}
    shared = {"sp": sequence, "tp": tensor}
    return data | {name: size for name, size in shared.items() if size > 1}


def embeddings_of(model: nn.Module) -> list[str]:
    """Return the names of the weights of a module's embeddings that are trained, as patterns that match no other."""
    weights = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}
    return [glob.escape(name) for name, x in model.named_parameters() if id(x) in weights and x.requires_grad]


def compute_dtype(config: Groups) -> torch.dtype:
    """Return the dtype of the parameters in the step."""
    return torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else torch.float32


def _curriculum(config: Groups, axes: Mapping[str, int]) -> FunctionCall | None:
    asked, lengths = config.curriculum_learning, difficulty_call(config)
    if asked.enabled and asked.curriculum_type is None:
        raise ConfigError(
            "nobody knows what the curriculum makes easier",
            where="curriculum_learning.curriculum_type",
            got="null",
            want='"seqlen"',
        )
    if lengths is not None and axes.get("sp", 1) > 1:
        raise ConfigError(
            "a curriculum would cut parts of sequences, each rank its own",
            where="curriculum_learning.enabled, sequence_parallel_size",
            got=f"ranks along an axis of {axes['sp']}, which share rows",
            want="one of the two",
            hint="rows can be cut before they are divided: docs/data-efficiency.md",
        )
    return None if lengths is None else FunctionCall("curriculum", ("seqlen", lengths))


def _microbatches(config: Groups, axes: Mapping[str, int]) -> FunctionCall | None:
    n = config.batch.gradient_accumulation_steps
    if axes.get("pp", 1) == 1:
        return FunctionCall.of("accumulate", n) if n != 1 else None
    partition = "parameters" if config.pipeline.partition == "best" else config.pipeline.partition
    return FunctionCall.of("pipeline", Name("plans.one_f_one_b"), AxisOf("pp"), num_microbatches=n, partition=partition)


def _sharding(config: Groups, axes: Mapping[str, int], embeddings: Sequence[str]) -> FunctionCall:
    zero = config.zero_optimization
    communication, copies = config.communication, axes.get("replicate", 1) > 1
    rows = {name: FunctionCall("transports.rows") for name in embeddings} if _sends_rows(config) else {}
    factor = communication.gradient_predivide_factor
    num_ranks, several = data_ranks(axes) * axes.get("sp", 1), axes.get("node", 1) > 1
    predivide = float(num_ranks) if communication.prescale_gradients else factor if factor != 1 else None
    in_node = "dp,sp" if axes.get("sp", 1) > 1 else "dp"
    return FunctionCall.of(
        "shard_optimizer",
        AxisOf(f"node,{in_node}" if several else in_node),
        stage=zero.stage,
        replicate=AxisOf("replicate") if copies else None,
        **(_sizes(config) if zero.stage else {}),
        predivide=predivide,
        **(_ways(config, in_node if several else None) if zero.stage == 3 else {"gradients": rows or None}),
    )


def _tensor_parallel(config: Groups) -> FunctionCall | None:
    asked = config.tensor_parallel
    overlap = int(asked.tp_overlap_comm)
    return FunctionCall.of("tensor_parallel", AxisOf("tp"), overlap=overlap) if asked.enabled else None


def _sends_rows(config: Groups) -> bool:
    """Return whether gradients of embeddings travel by rows: not where slices are reduced, as in DeepSpeed."""
    return config.communication.sparse_gradients and config.zero_optimization.stage < 2


def _ways(config: Groups, node: str | None) -> dict[str, Any]:
    """Return how parameters and gradients travel at stage 3, inside a node first where the mesh has several: ZeRO++."""
    zero = config.zero_optimization

    def integers(bits: int) -> FunctionCall:
        way = FunctionCall("transports.quantized", (bits,))
        return way if node is None else FunctionCall("transports.hierarchical", (way,))

    return {
        "weights": integers(8) if zero.zero_quantized_weights else None,
        "gradients": integers(4) if zero.zero_quantized_gradients else None,
        "secondary": AxisOf(node) if node and zero.zero_hpz_partition_size > 1 else None,
    }


def _frozen_weights(config: Groups) -> FunctionCall | None:
    zero = config.zero_optimization
    return FunctionCall.of("quantize_frozen") if zero.stage == 3 and zero.zero_quantized_nontrainable_weights else None


def _sizes(config: Groups) -> dict[str, int]:
    """Return the sizes of messages that were given, and at stage 3 the size below which parameters stay whole.

    A bound of live parameters makes the buckets smaller (two are whole while others are in flight); it does not refuse
    a parameter larger than the bound.
    """
    zero = config.zero_optimization
    bucket_sizes = [zero[name] for name in ("reduce_bucket_size", "allgather_bucket_size") if name in zero.given]
    out = {"bucket_bytes": 4 * min(n for n in bucket_sizes if n)} if any(bucket_sizes) else {}
    if zero.stage < 3:
        return out
    live = zero.stage3_max_live_parameters if "stage3_max_live_parameters" in zero.given else 0
    bucket = out.get("bucket_bytes", MOST_BYTES)
    if 0 < 4 * live // 3 < bucket:
        out["bucket_bytes"] = bucket = max(4 * live // 3, 4)
    if "stage3_prefetch_bucket_size" in zero.given:
        ahead = -(-4 * zero.stage3_prefetch_bucket_size // bucket)
        out["prefetch"] = min(ahead, max(4 * live // bucket - 2, 0)) if live else ahead
    return out | {"persist_below": zero.stage3_param_persistence_threshold + 1}


def _precision(config: Groups, axes: Mapping[str, int]) -> FunctionCall | None:
    compute, sent = compute_dtype(config), config.communication
    reduce_name = sent.seq_parallel_communication_data_type if axes.get("sp", 1) > 1 else sent.communication_data_type
    accumulate_name = config.data_types.grad_accum_dtype
    sums = compression.sums_scores(config)
    usual = torch.float32 if sums and compute == torch.float16 else compute  # which has no room for gradients of sums
    accumulate = usual if accumulate_name is None else DTYPES[accumulate_name]
    reduce = usual if reduce_name is None else DTYPES[reduce_name]
    if compute == accumulate == reduce == torch.float32:
        return None
    return FunctionCall.of(
        "precision",
        compute,
        reduce=None if reduce == accumulate else reduce,
        accumulate=accumulate,
        keep_float32=(SUMS,) if sums else default("precision", "keep_float32"),
    )


def _autocast(config: Groups) -> FunctionCall | None:
    if config.amp.enabled:
        return FunctionCall.of("autocast", torch.float16)
    if config.torch_autocast.enabled:
        return FunctionCall.of("autocast", DTYPES[config.torch_autocast.dtype or "bfloat16"])
    return None


def _recomputation(config: Groups, axes: Mapping[str, int]) -> FunctionCall | None:
    """Return the call that keeps inputs of layers: where anything says of which layers, or how they share them.

    As in DeepSpeed, a buffer for them alone makes no layer be computed again.
    """
    interval, asked = config.pipeline.activation_checkpoint_interval, config.activation_checkpointing
    store = "host" if asked.cpu_checkpointing else "device"
    partition = AxisOf("tp") if asked.partition_activations and axes.get("tp", 1) > 1 else None
    if not interval and store == "device" and partition is None:
        return None
    contiguous = asked.contiguous_memory_optimization
    return FunctionCall.of(
        "checkpoint_activations",
        store=store,
        every=max(interval, 1),
        partition=partition,
        contiguous=contiguous,
        number=(asked.number_checkpoints or None) if contiguous else None,
    )


def _kept_tokens(config: Groups) -> FunctionCall | None:
    """Return the call that has layers compute some of the tokens, or None."""
    call, asked = random_ltd_call(config), config.data_efficiency.data_routing.random_ltd.layer_token_lr_schedule
    if call is not None and asked.enabled and schedule_call(config) is None:
        raise ConfigError(
            "nothing is there that could follow the tokens of layers",
            where="data_efficiency.data_routing.random_ltd.layer_token_lr_schedule.enabled, scheduler.type",
            got="true, and no scheduler in the JSON",
            want="a scheduler",
            hint="around one of your own, without this key: fds.schedules.by_layer_tokens(schedule, ...)",
        )
    return call


def _layer_drop(config: Groups) -> FunctionCall | None:
    asked = config.progressive_layer_drop
    return FunctionCall.of("layer_drop", theta=asked.theta, gamma=asked.gamma) if asked.enabled else None


def loss_scale_call(config: Groups) -> FunctionCall | None:
    """Return the call that scales the loss, or None."""
    fp16, amp = config.fp16, config.amp
    if amp.enabled:
        if isinstance(amp.loss_scale, int | float):
            return FunctionCall.of("static_loss_scale", float(amp.loss_scale))
        least = 1.0 if amp.min_loss_scale is None else amp.min_loss_scale
        return FunctionCall.of("loss_scale", **_GRAD_SCALER, minimum=least)
    if config.torch_autocast.enabled and DTYPES[config.torch_autocast.dtype or "bfloat16"] == torch.float16:
        return FunctionCall.of("loss_scale", **_GRAD_SCALER)
    if not fp16.enabled:
        return None
    if fp16.loss_scale:
        return FunctionCall.of("static_loss_scale", float(fp16.loss_scale))
    return FunctionCall.of(
        "loss_scale",
        initial=2.0**fp16.initial_scale_power,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        minimum=fp16.min_loss_scale,
    )


def _finite(config: Groups) -> FunctionCall | None:
    return FunctionCall.of("skip_nonfinite") if config.bf16.enabled and config.bf16.check_grad_overflow else None


def _profile(config: Groups) -> FunctionCall | None:
    asked = config.flops_profiler
    if not asked.enabled:
        return None
    depth = None if asked.module_depth == -1 else asked.module_depth
    return FunctionCall.of(
        "profiled",
        asked.profile_step,
        depth=depth,
        top=asked.top_modules,
        detailed=asked.detailed,
        file=asked.output_file or None,
    )


def clipping_call(config: Groups) -> FunctionCall | None:
    """Return the call that clips the gradient, or None."""
    bound = config.clipping.gradient_clipping
    return FunctionCall.of("clip_by_global_norm", bound) if bound else None
