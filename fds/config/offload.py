"""From `offload_optimizer`, `offload_param` and `aio` to the call that lets leaves live on the host or a disk."""

from __future__ import annotations

from fds.config.function_call import FunctionCall, default
from fds.config.keys import Groups
from fds.config.record import Config

_SUB_GROUP = 16  # bytes an element: master, two moments and gradient
_LEAST_BUFFER = 2**20  # bytes of a buffer, below which a disk is slow


def offload_call(config: Groups, *, low: bool) -> FunctionCall | None:
    """Return the call that lets leaves live elsewhere, or None; `low` says whether the loss computes in 16 bit.

    Masters live where `offload_param` says; in 16 bit, where they are the optimizer's alone, else where
    `offload_optimizer` says.
    """
    zero = config.zero_optimization
    optimizer = _medium(config, zero.offload_optimizer)
    param = _medium(config, zero.offload_param)
    if optimizer is None and param is None:
        return None
    group = zero.offload_optimizer if optimizer is not None else None
    part, ahead = (1.0, False) if group is None else (group.ratio, group.super_offload)
    masters = param or (optimizer if low else None)
    return FunctionCall.of(
        "offload", moments=optimizer, masters=masters, gradients=optimizer, ratio=part, speculate=ahead
    )


def _medium(config: Groups, of: Config | None) -> str | FunctionCall | None:
    """Return where a group lets leaves live; None for the device."""
    if of is None or of.device == "none":
        return None
    if of.device == "cpu":
        return "host"
    return FunctionCall.of("disk", of.nvme_path, **_disk_sizes(config))


def _disk_sizes(config: Groups) -> dict[str, int]:
    """Return the sizes of reads and writes that were given.

    Buffers become smaller by them, never larger: DeepSpeed's sizes are of whole models, and larger buffers bring no
    speed.
    """
    zero, aio = config.zero_optimization, config.aio
    sizes = [default("disk", "buffer_bytes")]
    if "sub_group_size" in zero.given and zero.sub_group_size:
        sizes.append(_SUB_GROUP * zero.sub_group_size)
    param = zero.offload_param
    if param is not None and "buffer_size" in param.given and param.buffer_size:
        sizes.append(4 * param.buffer_size)
    out: dict[str, int] = {"buffer_bytes": max(min(sizes), _LEAST_BUFFER)}
    if not aio.given.isdisjoint(("queue_depth", "intra_op_parallelism")):
        out["queue_depth"] = aio.queue_depth * aio.intra_op_parallelism
    return out
