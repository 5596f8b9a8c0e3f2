"""The result of a loss: a total, its weight, the user's metrics and the new module buffers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.autodiff import check_scalar
from fds.errors import LossError, is_number

_LARGEST = sys.float_info.max
RESERVED = ("loss", "step", "lr", "grad_norm", "loss_scale", "skipped", "at_minimum_scale", "outputs", "weight")


@tree.record
class Mean:
    """A weighted mean as total and weight, so that means of microbatches and ranks combine exactly.

    Return `Mean(token_losses.sum(), num_target_tokens)` in place of a scalar: the step then computes
    sum(total) / sum(weight) over all microbatches and data ranks. A plain scalar is `Mean(loss, 1)`.

    In float16 the loss scale multiplies the mean, so a large weight does not make gradients overflow. The total itself
    must not overflow: sum it in float32, `token_losses.float().sum()`, or `metrics["loss"]` is infinite. If the weight
    of a microbatch is so much larger than that of the first one that float16 overflows, the step is skipped. If all
    weights together are 0, the step is skipped: everything but `state.calls` stays, `metrics["skipped"]` is true, and
    `metrics["loss"]` is the total.
    """

    total: Tensor  # () floating point
    weight: Tensor | float  # () or a number, not negative

    def __init__(self, total: Tensor, weight: Tensor | float):  # torch.compile cannot trace what attrs writes
        object.__setattr__(self, "total", total)
        object.__setattr__(self, "weight", weight)


@attrs.frozen(eq=False, repr=False)
class Buffered:
    """A loss that carries module buffers: see `with_buffers`."""

    loss_fn: Callable[..., Any]
    buffers: dict[str, Tensor]

    def __repr__(self) -> str:
        name = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
        count = f"{len(self.buffers)} buffer{'s' * (len(self.buffers) != 1)}"
        return f"{name} with {count}, {tree.num_bytes(self.buffers):,} bytes"


def with_buffers(loss_fn: Callable[..., Any], buffers: dict[str, Tensor]) -> Buffered:
    """Make a loss from `loss_fn(params, batch, buffers) -> (scalar or Mean, metrics, new_buffers)`.

    `buffers` (name -> tensor) are the initial `state.buffers`. Each microbatch starts from those that the one before it
    returned; a recomputation discards its updates, a skipped step keeps the old ones. Gradients do not flow through
    them.

    Raises `LossError` if `buffers` is not such a dict.
    """
    if not (isinstance(buffers, Mapping) and all(isinstance(x, Tensor) for x in buffers.values())):
        raise LossError(
            "these are not buffers",
            where="with_buffers",
            got=repr(buffers)[:60],
            want="a dict: name -> tensor, such as fds.functional returns",
        )
    return Buffered(loss_fn, dict(buffers))


@attrs.frozen(eq=False)
class Outcome:
    """One evaluation of a loss on one microbatch."""

    total: Tensor  # () float32 or float64, with its graph while training
    weight: Tensor | float
    weighted: bool  # a `Mean`, not a plain scalar
    metrics: dict[str, Tensor | float | int]
    buffers: dict[str, Tensor]
    half: bool = False  # whether the loss returned a float16 total


def read(value: Any, *, where: str, buffers: dict[str, Tensor], threaded: bool = False) -> Outcome:
    """Return the result of a loss as an `Outcome`; a `threaded` loss returns new buffers as the third of three values.

    Raises `LossError` for a vector, an integer, metrics of another type, or missing values.
    """
    if threaded:
        if not (isinstance(value, tuple) and len(value) == 3):
            raise LossError(
                "a loss with buffers returns three things",
                where=where,
                got=_kind(value),
                want="(scalar, metrics, new_buffers)",
            )
        buffers, value = _check_buffers(value[2], buffers, where), value[:2]
    metrics: dict[str, Any] = {}
    if isinstance(value, tuple):
        if len(value) != 2 or not isinstance(value[1], dict):
            raise LossError(
                "a loss returns a scalar, or a scalar and a dict of metrics",
                where=where,
                got=_kind(value),
                want="scalar or (scalar, metrics)",
            )
        value, metrics = value
    weighted = isinstance(value, Mean)
    total, weight = (value.total, value.weight) if weighted else (value, 1)
    check_scalar(total, where)
    if isinstance(weight, Tensor) and weight.dim() == 0 and not weight.is_complex():
        weight = _wide(weight.detach())
        if weight.device.type == "cpu" and total.device.type != "cpu":
            weight = float(weight)  # copying it to the device would wait for the work queued there
    elif not is_number(weight) or not 0 <= weight <= _LARGEST:
        raise LossError(
            "the weight of a Mean is not a number of rows, tokens, ...",
            where=where,
            got=_kind(weight),
            want="a 0-d tensor, a float or an int, finite and not negative",
        )
    elif weighted:
        weight = float(weight)
    half = total.dtype is torch.float16
    if tree.is_low(total):
        total = total.float()  # a loss scale of 2**16 is infinite in float16
    return Outcome(total, weight, weighted, {k: _metric(k, v, where) for k, v in metrics.items()}, buffers, half)


def total_of(value: Any) -> Any:
    """Return the total in what a loss returned, which is not checked."""
    value = value[0] if isinstance(value, tuple) and value else value
    return value.total if isinstance(value, Mean) else value


def _metric(name: str, value: Any, where: str) -> Tensor | float | int:
    path = f"{where}, metrics[{name!r}]"
    if not isinstance(name, str) or name in RESERVED or name.startswith("lr/"):
        raise LossError(
            "the name of a metric is reserved",
            where=path,
            got=repr(name),
            want="a string other than " + ", ".join(RESERVED),
        )
    if isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex():
        return _wide(value.detach())
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise LossError(
            "an integer metric is beyond int64",
            where=path,
            got=_kind(value),
            want="-2**63 to 2**63 - 1",
            hint="float(x) is averaged, not summed",
        )
    if isinstance(value, int | float):
        return int(value) if isinstance(value, bool) else value
    raise LossError("a metric is not a number", where=path, got=_kind(value), want="a 0-d tensor, a float or an int")


def _check_buffers(new: Any, old: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    if not isinstance(new, dict) or new.keys() != old.keys():
        got = sorted(new) if isinstance(new, dict) else _kind(new)
        raise LossError(
            "a loss returned other buffers than it was given", where=where, got=str(got), want=str(sorted(old))
        )
    for name, value in new.items():
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (old[name].shape, old[name].dtype):
            raise LossError(
                "a loss returned a buffer of another shape or dtype",
                where=f"{where}, buffers[{name!r}]",
                got=_kind(value),
                want=_kind(old[name]),
                hint="a buffer keeps its shape and dtype: allocate a cache at its largest "
                "size and write into it, or return it as an output and pass it in the batch",
            )
    return {name: value.detach().clone() for name, value in new.items()}


def _wide(x: Tensor) -> Tensor:
    """Return a scalar in a dtype in which many can be summed: int64, float32 or float64."""
    if not x.is_floating_point():
        return x.long()
    return x if x.dtype is torch.float64 else x.float()


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    if isinstance(value, tuple):
        return "(" + ", ".join(_kind(v) for v in value) + ")"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"int of {value.bit_length()} bits"
    return f"{type(value).__name__} {value!r}"[:80]
