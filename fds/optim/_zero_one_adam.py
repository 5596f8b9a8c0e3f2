"""0/1 Adam: Adam in signs between rarer and rarer whole sums; then steps of each rank's own, agreed on in signs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from fds.errors import OptimizerError, checked_call, is_int
from fds.optim.arguments import call_text, check_betas, check_numbers
from fds.optim.assembly import Now, assemble
from fds.optim.base import LRSchedule, Optimizer
from fds.optim.exchange import LOCAL_MOMENTUM, LOCAL_UPDATE, SERVER, WORKER, moved, signed_bytes, signed_sums
from fds.optim.masks import Masks
from fds.optim.momentum import plus, summed_moments, wide


@attrs.frozen
class GrowingIntervals:
    """The phases of 0/1 Adam. Calls are counted from 1 here; those of an interval of k are the multiples of k."""

    apart: ClassVar[bool] = True
    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if not is_int(value, 1):
                raise OptimizerError(
                    f"zero_one_adam: {name} is out of range", where=name, got=repr(value)[:80], want="an int >= 1"
                )

    def local(self, calls: int) -> bool:
        """Say whether gradients stay on their ranks: in all calls but those that update the variance."""
        if calls >= self.var_freeze_step:
            return True
        last, interval = 0, 1
        while calls + 1 > (last := (last // interval + self.var_update_scaler) * interval):  # the last of this interval
            interval *= 2
        return (calls + 1) % interval > 0

    def begins(self, calls: int) -> bool:
        """Say whether local steps begin: what messages of gradients have lost is nothing to those of updates."""
        return calls == self.var_freeze_step

    def agrees(self, calls: int) -> bool:
        """Say whether, where ranks take steps of their own, they agree in the end."""
        doublings = (calls - self.var_freeze_step) // self.local_step_scaler
        clipper = self.local_step_clipper
        return (calls + 1) % min(clipper, 1 << min(doublings, clipper.bit_length())) == 0

    def bytes_sent(self, lengths: Sequence[int], size: int) -> int:
        """Return the bytes of a sign for each number, sent twice, and of the scales."""
        return signed_bytes(lengths, size)


@checked_call
def zero_one_adam(
    lr: LRSchedule = 1e-3,
    var_freeze_step: int = 100_000,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32_678,
    local_step_clipper: int = 16,
    betas: tuple[LRSchedule, LRSchedule] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: LRSchedule = 0.0,
    *,
    exp_avg_mask: Mapping[str, Tensor] | None = None,
) -> Optimizer:
    """Update as Adam does, with ever more gradients sent as signs; then let ranks take steps of their own.

    In the first `var_freeze_step` calls, element by element, without bias correction::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2                        in calls that sum gradients
        p = p - lr * (m / (sqrt(v) + eps) + weight_decay * p)

    Gradients are summed in every call at first; after `var_update_scaler` such calls in every second one, after as many
    more in every fourth, and so on. In the others v stays, and g is sent as one bit a number, and one scale for each
    parameter and rank: 1/32 of the bytes. What the two messages lose is added to the next ones. Elements whose variance
    is 0 had no gradient yet: what arrives of them in signs is 0, and so is m of each rank.

    Afterwards v stays, and each rank goes on from q = p with its own gradients and momentum, and sends nothing::

        m = beta1 * m + (1 - beta1) * g
        u = u - lr * (m / (sqrt(v) + eps) + weight_decay * q)    q = p + u

    until the call in which ranks agree, in which the mean over ranks of u is sent in signs::

        x = mean(u * (sqrt(v) + eps)),  p = p + x / (sqrt(v) + eps),  m = -x / (sum of lr in these calls),  u = 0

    At first that is in every call; the interval doubles after every `local_step_scaler` calls, up to
    `local_step_clipper`. Calls are counted by the step, skipped ones included, so that all ranks do the same.

    `state.params` are those agreed on last, alike on all ranks, and so is all of `state.opt`: with them go averages,
    `evaluate`, `step.params` and saves. What a rank has of its own lies in slots of the step.

    Slots: exp_avg (m of all ranks; 0 where each has its own), exp_avg_sq (v). The step remembers, by parameter in
    float32, worker_error, server_error, local_momentum and local_update, this rank's shares of m and u, and local_lr.

    Args:
        lr: learning rate; it, the betas and weight_decay may be schedules f(t). Where it is 0 from one agreement to
            the next, m is 0 afterwards.
        var_freeze_step: calls before ranks take steps of their own, at least 1. The variance must be a good one by
            then: a learning rate that warms up should have done so.
        var_update_scaler: calls with whole sums, after which the interval between them doubles.
        local_step_scaler: calls with local steps, after which the interval between agreements doubles.
        local_step_clipper: the longest interval between agreements, in calls.
        betas: decay of the two running means, in [0, 1).
        eps: added to the square root.
        weight_decay: weight of the parameter in the update.
        exp_avg_mask: shell-style pattern of names -> tensor that what arrives in signs is multiplied by, of a shape
            that expands to the parameter's: 0 where gradients are no longer there, which a sign cannot say.

    Torch operators update all parameters. Composes as `onebit_adam` does, and is refused where that is.

    Raises `OptimizerError` for a value out of range, for a pattern that no parameter has, and for a mask of a shape
    that does not expand to its parameter's.
    Source: Lu et al. 2022, arXiv:2202.06009, algorithm 1; the intervals and the order of operations are DeepSpeed's.

    >>> zero_one_adam(3e-4, var_freeze_step=1000)
    zero_one_adam(lr=0.0003, var_freeze_step=1000)
    """
    masks = Masks.of("zero_one_adam", exp_avg_mask)
    text = call_text(zero_one_adam, {**locals(), "exp_avg_mask": masks.by_pattern or None})
    check_numbers("zero_one_adam", lr=lr, weight_decay=weight_decay)
    check_numbers("zero_one_adam", eps=eps, schedule=False)
    check_betas("zero_one_adam", betas)
    phases = GrowingIntervals(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)
    optimizer = assemble(
        partial(_rule, phases=phases, eps=eps, masks=masks),
        text=text,
        hyper={"lr": lr, "beta1": betas[0], "beta2": betas[1], "weight_decay": weight_decay},
        slots={"exp_avg": 0.0, "exp_avg_sq": 0.0},
        whole=True,
        check=masks.check_shapes,
        phases=phases,
    )
    return attrs.evolve(optimizer, check=masks.check_names)


def _rule(
    params: list[Tensor],
    grads: list[Tensor],
    opt: dict[str, list[Tensor]],
    now: Now,
    *,
    phases: GrowingIntervals,
    eps: float,
    masks: Masks,
) -> None:
    lr, beta1, beta2, weight_decay = now.read("lr", "beta1", "beta2", "weight_decay")
    grads, momenta, variances = now.unscale(grads), opt["exp_avg"], opt["exp_avg_sq"]
    if now.exchange is not None and now.exchange.calls >= phases.var_freeze_step:
        _step_locally(params, grads, opt, now, eps=eps)
        if phases.agrees(now.exchange.calls):
            _agree(params, opt, now, eps=eps, masks=masks)
        return
    if now.exchange is None:
        for g, m, v in zip(grads, momenta, variances, strict=True):
            for old, new in zip((m, v), summed_moments(m, v, g, beta1, beta2), strict=True):
                now.write(old, new)
    else:
        sums = signed_sums(now.exchange.axis, list(map(wide, grads)), opt[WORKER], opt[SERVER])
        for m, v, g, (segment,) in zip(momenta, variances, sums, now.segments, strict=True):
            now.write(m, plus(m * beta1, masks.masked(g.mul_(v > 0), segment).to(m.dtype), 1 - beta1))
    for p, m, v in zip(params, momenta, variances, strict=True):
        u = m / v.sqrt().add_(eps)
        now.write(p, p - u.add_(p * weight_decay).mul_(lr))


def _step_locally(
    params: list[Tensor], grads: list[Tensor], opt: dict[str, list[Tensor]], now: Now, *, eps: float
) -> None:
    """Take a step of this rank's own: of its momentum and update the state has shares, which add up to means."""
    assert now.exchange is not None
    lr, beta1, weight_decay = now.read("lr", "beta1", "weight_decay")
    size = now.exchange.size
    names = ("exp_avg", "exp_avg_sq", LOCAL_MOMENTUM, LOCAL_UPDATE)
    for p, g, m, v, own, u in zip(params, grads, *(opt[name] for name in names), strict=True):
        own += wide(m) / size  # one of the two is 0
        now.write(m, torch.zeros_like(m))
        own.copy_(plus(own * beta1, wide(g), 1 - beta1)).mul_(v > 0)
        step = own / wide(v).sqrt().add(eps)
        u -= step.add_(wide(moved(p, u, size)) * weight_decay / size).mul_(lr)
    now.exchange.lr.add_(lr)


def _agree(params: list[Tensor], opt: dict[str, list[Tensor]], now: Now, *, eps: float, masks: Masks) -> None:
    """Move the parameters by the mean over ranks of their updates, and let all begin anew there."""
    assert now.exchange is not None
    roots = [wide(v).sqrt().add(eps) for v in opt["exp_avg_sq"]]
    given = [u * root for u, root in zip(opt[LOCAL_UPDATE], roots, strict=True)]
    sums = signed_sums(now.exchange.axis, given, opt[WORKER], opt[SERVER])
    lr = now.exchange.lr
    every = zip(params, opt["exp_avg"], opt["exp_avg_sq"], roots, sums, now.segments, strict=True)
    for p, m, v, root, x, (segment,) in every:
        x = masks.masked(x.mul_(v > 0), segment)
        now.write(m, torch.where(lr == 0, 0, -(x / lr)).to(m.dtype))
        now.write(p, (wide(p) + x / root).to(p.dtype))
    for mine in (*opt[LOCAL_MOMENTUM], *opt[LOCAL_UPDATE], lr):
        mine.zero_()
