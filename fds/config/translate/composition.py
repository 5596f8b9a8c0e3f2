"""From a configuration to the calls of fds that it comes to, in the order of the stations that they fill."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fds.config.keys.communication import DTYPES
from fds.config.keys.groups import Groups
from fds.config.translate.function_call import AxisOf, Call, Name
from fds.config.translate.optimizer import optimizer
from fds.config.translate.unsupported import refuse_what_is_not_there
from fds.errors import ConfigError, MeshError
from fds.layout import MOST_BYTES

_GRAD_SCALER = {"window": 2000, "hysteresis": 1}  # as torch.amp.GradScaler and Apex have it, not DeepSpeed's fp16


def calls(config: Groups, axes: Mapping[str, int]) -> tuple[Call, ...]:
    """Return the calls. Raises `NotSupportedError`, `ConfigError`, and `MeshError` for a mesh without `dp`."""
    refuse_what_is_not_there(config)
    return composed(config, axes)[0]


def composed(config: Groups, axes: Mapping[str, int]) -> tuple[tuple[Call, ...], Groups]:
    """Return the calls of what fds has, and the configuration with nothing open."""
    config = config.resolve(world_size=data_ranks(axes))
    _refuse_other_sizes(config, axes)
    made = (_microbatches(config, axes), _sharding(config, axes), _precision(config), _autocast(config),
            _recomputation(config), scale(config), _finite(config), clip(config), optimizer(config))
    return tuple(call for call in made if call is not None), config


def _refuse_other_sizes(config: Groups, axes: Mapping[str, int]) -> None:
    """Raise `ConfigError` for keys that say other sizes than the mesh has."""
    shards = config.zero_optimization.mics_shard_size if config.zero_optimization.stage == 3 else 0
    for key, said, has in (
        ("data_parallel_size", config.parallel_sizes.data_parallel_size, data_ranks(axes)),
        ("pipeline.stages", config.pipeline.stages, axes.get("pp", 1)),
        ("zero_optimization.mics_shard_size", max(shards, 0) or None, axes["dp"]),
    ):
        if isinstance(said, int) and said != has:
            raise ConfigError("the mesh is of another size", where=key, got=f"{said}, and the mesh has {has}",
                              want='fds.mesh(pp=stages, replicate=copies, dp=shards)')


def data_ranks(axes: Mapping[str, int]) -> int:
    """Return how many ranks have batches of their own."""
    if not isinstance(axes, Mapping) or not all(type(n) is int and n > 0 for n in axes.values()):
        raise MeshError("these are no sizes of axes", got=repr(axes)[:80], want='fds.mesh(dp=-1), or {"dp": 8}')
    if "dp" not in axes:
        raise MeshError("the mesh has no axis for data ranks", got=", ".join(axes) or "no axes", want='"dp"',
                        hint="fds.mesh(dp=-1)")
    strange = [name for name, size in axes.items() if name not in ("dp", "replicate", "pp") and size > 1]
    if strange:
        raise MeshError("a configuration has no use for these axes", got=", ".join(strange), want="dp, replicate, pp")
    return axes["dp"] * axes.get("replicate", 1)


def compute_dtype(config: Groups) -> torch.dtype:
    """Return the dtype of the parameters in the step."""
    return torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else torch.float32


def _microbatches(config: Groups, axes: Mapping[str, int]) -> Call | None:
    n = config.batch.gradient_accumulation_steps
    if axes.get("pp", 1) == 1:
        return Call.of("accumulate", n) if n != 1 else None
    partition = "parameters" if config.pipeline.partition == "best" else config.pipeline.partition
    return Call.of("pipeline", Name("plans.one_f_one_b"), AxisOf("pp"), num_microbatches=n, partition=partition)


def _sharding(config: Groups, axes: Mapping[str, int]) -> Call:
    zero = config.zero_optimization
    communication, copies = config.communication, axes.get("replicate", 1) > 1
    factor = communication.gradient_predivide_factor
    predivide = float(data_ranks(axes)) if communication.prescale_gradients else factor if factor != 1 else None
    return Call.of(
        "shard_optimizer", AxisOf("dp"), stage=zero.stage, replicate=AxisOf("replicate") if copies else None,
        **(_sizes(config) if zero.stage else {}), predivide=predivide,
    )


def _sizes(config: Groups) -> dict[str, int]:
    """Return the sizes of messages: those that were given, and at stage 3 what stays whole.

    A bound of live parameters shrinks buckets, of which two are whole and others on their way; it never refuses a
    parameter that is larger than it.
    """
    zero = config.zero_optimization
    given = [zero[name] for name in ("reduce_bucket_size", "allgather_bucket_size") if name in zero.given]
    out = {"bucket_bytes": 4 * min(n for n in given if n)} if any(given) else {}
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


def _precision(config: Groups) -> Call | None:
    compute, sent = compute_dtype(config), config.communication.communication_data_type
    summed = config.data_types.grad_accum_dtype
    accumulate = compute if summed is None else DTYPES[summed]
    reduce = compute if sent is None else DTYPES[sent]
    if compute == accumulate == reduce == torch.float32:
        return None
    return Call.of("precision", compute, reduce=None if reduce == accumulate else reduce, accumulate=accumulate)


def _autocast(config: Groups) -> Call | None:
    if config.amp.enabled:
        return Call.of("autocast", torch.float16)
    if config.torch_autocast.enabled:
        return Call.of("autocast", DTYPES[config.torch_autocast.dtype or "bfloat16"])
    return None


def _recomputation(config: Groups) -> Call | None:
    every = config.pipeline.activation_checkpoint_interval
    store = "host" if config.activation_checkpointing.cpu_checkpointing else "device"
    return Call.of("checkpoint_activations", store=store, every=max(every, 1)) if every or store == "host" else None


def scale(config: Groups) -> Call | None:
    """Return the call that scales the loss; None where nothing does."""
    fp16, amp = config.fp16, config.amp
    if amp.enabled:
        if isinstance(amp.loss_scale, int | float):
            return Call.of("static_loss_scale", float(amp.loss_scale))
        least = 1.0 if amp.min_loss_scale is None else amp.min_loss_scale
        return Call.of("loss_scale", **_GRAD_SCALER, minimum=least)
    if config.torch_autocast.enabled and DTYPES[config.torch_autocast.dtype or "bfloat16"] == torch.float16:
        return Call.of("loss_scale", **_GRAD_SCALER)
    if not fp16.enabled:
        return None
    if fp16.loss_scale:
        return Call.of("static_loss_scale", float(fp16.loss_scale))
    return Call.of(
        "loss_scale", initial=2.0**fp16.initial_scale_power, window=fp16.loss_scale_window, hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis, minimum=fp16.min_loss_scale,
    )


def _finite(config: Groups) -> Call | None:
    return Call.of("skip_nonfinite") if config.bf16.enabled and config.bf16.check_grad_overflow else None


def clip(config: Groups) -> Call | None:
    """Return the call that clips the gradient; None where nothing does."""
    bound = config.clipping.gradient_clipping
    return Call.of("clip_by_global_norm", bound) if bound else None
