"""1-bit Adam: Adam for some steps; then its variance stays, and ranks send the signs of their momentum."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import attrs
from torch import Tensor

from fds.errors import checked_call
from fds.optim.arguments import call_text, check_betas, check_numbers
from fds.optim.assembly import Now, assemble
from fds.optim.base import LRSchedule, Optimizer
from fds.optim.exchange import blocks
from fds.optim.masks import Masks
from fds.optim.momentum import AfterWarmUp, sent_momenta, summed_moments, wide


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
            a shape that expands to the parameter's: 0 where gradients are 0 from some call on (rows of an embedding
            that are not used any more), which a sign cannot say.

    An element that had no gradient in warm-up has no variance, and moves by its decay alone: a step by a sign over eps
    would throw it away. Where all calls of warm-up are skipped that is every element, and `metrics["step"]` is 0 then.

    Torch operators update all parameters. Composes with `shard_optimizer(stage=0)`, also with replicas, pipelines,
    accumulation, precision, loss scales and `clip_by_global_norm`, which after warm-up goes by the norm of each rank's
    own gradient: then nobody has the whole one, so that other maps of it, slices of it (stages 1 to 3), offload and
    graphs of the step are refused, and no `grad_norm` is reported.

    Raises `OptimizerError` for a value out of range, for a pattern that no parameter has, and for a mask of a shape
    that does not expand to its parameter's.
    Source: Tang et al. 2021, arXiv:2102.02888, algorithm 1; the order of operations is DeepSpeed's.

    >>> onebit_adam(3e-4, freeze_step=1000)
    onebit_adam(lr=0.0003, freeze_step=1000)
    """
    masks = Masks.of("onebit_adam", exp_avg_mask)
    text = call_text(onebit_adam, {**locals(), "exp_avg_mask": masks.by_pattern or None})
    check_numbers("onebit_adam", lr=lr, weight_decay=weight_decay)
    check_numbers("onebit_adam", eps=eps, schedule=False)
    check_betas("onebit_adam", betas)
    optimizer = assemble(
        partial(_rule, eps=eps, masks=masks),
        text=text,
        hyper={"lr": lr, "beta1": betas[0], "beta2": betas[1], "weight_decay": weight_decay},
        slots={"exp_avg": 0.0, "exp_avg_sq": 0.0},
        whole=True,
        check=masks.check_shapes,
        phases=AfterWarmUp.of("onebit_adam", freeze_step),
    )
    return attrs.evolve(optimizer, check=masks.check_names)


def _rule(
    params: list[Tensor], grads: list[Tensor], opt: dict[str, list[Tensor]], now: Now, *, eps: float, masks: Masks
) -> None:
    lr, beta1, beta2, weight_decay = now.read("lr", "beta1", "beta2", "weight_decay")
    grads, momenta = now.unscale(grads), opt["exp_avg"]
    if now.exchange is None:
        for g, m, v in zip(grads, momenta, opt["exp_avg_sq"], strict=True):
            for old, new in zip((m, v), summed_moments(m, v, g, beta1, beta2), strict=True):
                now.write(old, new)
    else:
        for m, new in zip(momenta, sent_momenta(grads, opt, now, beta1, masks), strict=True):
            now.write(m, new.to(m.dtype))
    for lists in zip(params, momenta, opt["exp_avg_sq"], strict=True):
        for at in blocks(lists[0]):
            p, m, v = (x[at] for x in lists)
            u = wide(m) / wide(v).sqrt().add_(eps)
            now.write(p, (wide(p) - u.add_(p * weight_decay).mul_(lr)).to(p.dtype))
