"""1-bit Adam: Adam for some steps; then its variance stays, and ranks send the signs of their momentum."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import OptimizerError, checked_call, did_you_mean, is_int
from fds.layout import Segment
from fds.optim.arguments import call_text, check_betas, check_numbers
from fds.optim.assembly import Now, assemble
from fds.optim.base import LRSchedule, Optimizer
from fds.optim.exchange import SERVER, WORKER, signed_bytes, signed_sums


@attrs.frozen
class AfterWarmUp:
    """The phases of an optimizer that sends signs from some call on."""

    freeze_step: int

    def local(self, calls: int) -> bool:
        """Say whether warm-up is over."""
        return calls >= self.freeze_step

    def bytes_sent(self, lengths: Sequence[int], size: int) -> int:
        """Return the bytes of a sign for each number, sent twice, and of the scales."""
        return signed_bytes(lengths, size)


@checked_call
def onebit_adam(
    lr: LRSchedule = 1e-3,
    freeze_step: int = 100_000,
    betas: tuple[LRSchedule, LRSchedule] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: LRSchedule = 0.0,
    *,
    exp_avg_mask: Mapping[str, Tensor] | None = None,
) -> Optimizer:
    """Update as Adam does for `freeze_step` calls; then keep the variance, and send the signs of the momentum.

    In warm-up, element by element, without bias correction::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2
        p = p - lr * (m / (sqrt(v) + eps) + weight_decay * p)

    Afterwards v stays, no gradients are summed, and m is the mean over ranks of beta1 * m + (1 - beta1) * g with the
    gradient g of each, sent as one bit a number and one scale for each parameter and rank: 1/32 of the bytes. What the
    two messages lose is added to the next ones.

    Slots: exp_avg (m), exp_avg_sq (v). The step remembers, by parameter in float32, worker_error and server_error.

    Args:
        lr: learning rate; it, the betas and weight_decay may be schedules f(t).
        freeze_step: calls of the step in warm-up, at least 1, skipped ones included, so that all ranks change at once.
            The variance must be a good one by then: a learning rate that warms up should have done so.
        betas: decay of the two running means, in [0, 1).
        eps: added to the square root.
        weight_decay: weight of the parameter in the update.
        exp_avg_mask: shell-style pattern of names -> tensor that the momentum is multiplied by after each message, of
            a shape that expands to the parameter's: 0 where a gradient is always 0 (rows of an embedding that are not
            used), which a sign cannot say.

    Torch operators update all parameters. Composes with `shard_optimizer(stage=0)`, also with replicas, pipelines,
    accumulation, precision and loss scales; after warm-up nobody has the whole gradient, so that maps of it (clips),
    slices of it (stages 1 to 3), offload and graphs of the step are refused, and no `grad_norm` is reported.

    Raises `OptimizerError` for a value out of range, for a pattern that no parameter has, and for a mask of a shape
    that does not expand to its parameter's.
    Source: Tang et al. 2021, arXiv:2102.02888, algorithm 1; the order of operations is DeepSpeed's.

    >>> onebit_adam(3e-4, freeze_step=1000)
    onebit_adam(lr=0.0003, freeze_step=1000)
    """
    masks = _checked(exp_avg_mask)
    text = call_text(onebit_adam, {**locals(), "exp_avg_mask": masks or None})
    check_numbers("onebit_adam", lr=lr, weight_decay=weight_decay)
    check_numbers("onebit_adam", eps=eps, schedule=False)
    check_betas("onebit_adam", betas)
    if not is_int(freeze_step, 1):
        raise OptimizerError(
            "onebit_adam: freeze_step is out of range", where="freeze_step", got=repr(freeze_step), want="an int >= 1"
        )
    optimizer = assemble(
        partial(_rule, eps=eps, masks=masks),
        text=text,
        hyper={"lr": lr, "beta1": betas[0], "beta2": betas[1], "weight_decay": weight_decay},
        slots={"exp_avg": 0.0, "exp_avg_sq": 0.0},
        whole=True,
        check=partial(_check_shapes, masks),
        phases=AfterWarmUp(freeze_step),
    )
    return attrs.evolve(optimizer, check=partial(_check_names, masks))


def _rule(
    params: list[Tensor],
    grads: list[Tensor],
    opt: dict[str, list[Tensor]],
    now: Now,
    *,
    eps: float,
    masks: Mapping[str, Tensor],
) -> None:
    lr, beta1, beta2, weight_decay = now.read("lr", "beta1", "beta2", "weight_decay")
    grads, momenta = now.unscale(grads), opt["exp_avg"]
    if now.exchange is None:
        for g, m, v in zip(grads, momenta, opt["exp_avg_sq"], strict=True):
            now.write(m, _plus(m * beta1, g, 1 - beta1))
            now.write(v, torch.addcmul(v * beta2, g * (1 - beta2), g))
    else:
        share = beta1 / now.exchange.size  # of the momentum that all ranks have: the shares add up, as gradients do
        given = [_plus(_wide(m) * share, _wide(g), 1 - beta1) for g, m in zip(grads, momenta, strict=True)]
        sums = signed_sums(now.exchange.axis, given, opt[WORKER], opt[SERVER])
        for m, total, (segment,) in zip(momenta, sums, now.segments, strict=True):
            mask = _mask_of(segment, masks)
            now.write(m, (total if mask is None else total * _flat(mask, segment).to(total)).to(m.dtype))
    for p, m, v in zip(params, momenta, opt["exp_avg_sq"], strict=True):
        u = m / v.sqrt().add_(eps)
        now.write(p, p - u.add_(p * weight_decay).mul_(lr))


def _plus(x: Tensor, y: Tensor, factor: float | Tensor) -> Tensor:
    """Return x + factor * y, in one rounding where the factor is on the host."""
    return x.add_(y * factor) if isinstance(factor, Tensor) else x.add_(y, alpha=factor)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


def _mask_of(segment: Segment, masks: Mapping[str, Tensor]) -> Tensor | None:
    """Return the mask of the first pattern that a parameter's name matches."""
    return next((mask for pattern, mask in masks.items() if fnmatch.fnmatchcase(segment.name, pattern)), None)


def _flat(mask: Tensor, segment: Segment) -> Tensor:
    """Return a mask for every element of a parameter (n,)."""
    return mask.expand(segment.shape).reshape(-1)


def _checked(masks: Any) -> dict[str, Tensor]:
    """Return masks by pattern. Raises `OptimizerError` for anything else."""
    if masks is None:
        return {}
    good = isinstance(masks, Mapping) and all(isinstance(x, Tensor) and isinstance(k, str) for k, x in masks.items())
    if not good:
        raise OptimizerError(
            "onebit_adam: exp_avg_mask is not tensors by name",
            where="exp_avg_mask",
            got=repr(masks)[:80],
            want="{pattern: tensor of 0 and 1, ...}",
        )
    return {pattern: mask.detach() for pattern, mask in masks.items()}


def _check_names(masks: Mapping[str, Tensor], names: Sequence[str]) -> None:
    """Raise `OptimizerError` for a pattern that no parameter's name matches."""
    for pattern in masks:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise OptimizerError(
                "onebit_adam: a pattern matches no parameter",
                where=f"exp_avg_mask, {pattern!r}",
                got=f"{len(names)} parameters",
                want="the name of a parameter, with * for any part of it",
                hint=did_you_mean(pattern, names) if names else "there is no trainable parameter",
            )


def _check_shapes(masks: Mapping[str, Tensor], segments: Sequence[Sequence[Segment]]) -> None:
    """Raise `OptimizerError` for a mask of a shape that does not expand to its parameter's."""
    for segment in (s for inside in segments for s in inside):
        mask = _mask_of(segment, masks)
        if mask is None:
            continue
        try:
            _flat(mask, segment)
        except RuntimeError as error:
            raise OptimizerError(
                "onebit_adam: a mask has another shape than its parameter",
                where=f"exp_avg_mask, {segment.name}",
                got=str(tuple(mask.shape)),
                want=f"a shape that expands to {tuple(segment.shape)}",
            ) from error
