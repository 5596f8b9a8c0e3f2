"""Optimizers that send signs: `onebit_adam` and `onebit_lamb` after warm-up, `zero_one_adam` between whole sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import attrs
import torch
from torch import Tensor

from fds.errors import OptimizerError, checked_call, is_int
from fds.optim.assembly import Call, Now, Rule, Slots, Tensors
from fds.optim.base import LRSchedule, Optimizer
from fds.optim.exchange import (
    LOCAL_MOMENTUM,
    LOCAL_UPDATE,
    SERVER,
    WORKER,
    AfterWarmUp,
    GrowingIntervals,
    add_update,
    blocks,
    signed_sums,
)
from fds.optim.masks import Masks


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
    call = Call.of(onebit_adam, {**locals(), "exp_avg_mask": masks.by_pattern or None})
    rule = Rule(call, _onebit_adam, slots=_MOMENTS, check=masks.check_shapes)
    return _optimizer_of(rule, AfterWarmUp(freeze_step))


_MOMENTS = {"exp_avg": 0.0, "exp_avg_sq": 0.0}


def _optimizer_of(rule: Rule, phases: AfterWarmUp | GrowingIntervals) -> Optimizer:
    for name, value in attrs.asdict(phases).items():
        if not is_int(value, 1):
            what = f"{rule.name}: {name} is out of range"
            raise OptimizerError(what, where=name, got=repr(value)[:80], want="an int >= 1")
    return rule.optimizer(whole=True, phases=phases, check=rule.call.fixed["masks"].check_names)


def _onebit_adam(params: Tensors, grads: Tensors, opt: Slots, now: Now) -> None:
    lr, weight_decay, eps = now.read("lr", "weight_decay", "eps")
    grads, momenta = now.unscale(grads), opt["exp_avg"]
    if now.exchange is None:
        for g, m, v in zip(grads, momenta, opt["exp_avg_sq"], strict=True):
            write_moments(m, v, g, now)
    else:
        for m, new in zip(momenta, send_momenta(grads, opt, now), strict=True):
            now.write(m, new.to(m.dtype))
    for lists in zip(params, momenta, opt["exp_avg_sq"], strict=True):
        for at in blocks(lists[0]):
            p, m, v = (x[at] for x in lists)
            u = widen(m) / widen(v).sqrt().add_(eps)
            now.write(p, (widen(p) - u.add_(p * weight_decay).mul_(lr)).to(p.dtype))


@checked_call
def onebit_lamb(
    lr: LRSchedule = 1e-3,
    freeze_step: int = 100_000,
    betas: tuple[LRSchedule, LRSchedule] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: LRSchedule = 0.0,
    *,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    coeff_beta: float = 0.9,
    factor_max: float = 4.0,
    factor_min: float = 0.5,
    factor_threshold: float = 0.1,
    exp_avg_mask: Mapping[str, Tensor] | None = None,
) -> Optimizer:
    """Update as LAMB does for `freeze_step` calls; then keep the variance, and send the signs of the momentum.

    In warm-up, with norms over one whole parameter, without bias correction::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2
        u = m / (sqrt(v) + eps) + weight_decay * p
        c = clamp(|p| / |u|, min_coeff, max_coeff)          1 where either norm is 0
        k = coeff_beta * k + (1 - coeff_beta) * c           not where either norm is 0
        p = p - lr * c * u

    Afterwards v stays, no gradients are summed, and m is the mean over ranks of beta1 * m + (1 - beta1) * g with the
    gradient g of each, sent as one bit a number and one scale for each parameter and rank: 1/32 of the bytes. What the
    two messages lose is added to the next ones. The ratio of a parameter is k, which stays (1 where it is still 0),
    times a factor that follows w, the variance that would be, of the gradients as the momentum shows them::

        w = beta2 * w + (1 - beta2) * ((m - beta1 * m_before) / (1 - beta1))^2         v before
        u = m / (sqrt(v) + eps) + weight_decay * p
        f = max over the parameter of (sqrt(v) + eps) / (sqrt(w) + eps)
        r = min(1, |m / (sqrt(v) + eps)| / |u|)             the share of u that is not decay
        f = clamp(r * f + (1 - r), factor_min, factor_max), at most factor_threshold of it away from the one before
        p = p - lr * k * f * u

    Slots: exp_avg (m), exp_avg_sq (v), exp_avg_sq_fresh (w), and for each parameter one float64, lamb_coeff_freeze (k)
    and last_factor (f). The step remembers, by parameter in float32, worker_error and server_error.

    Args:
        lr: learning rate; it, the betas and weight_decay may be schedules f(t).
        freeze_step: calls of the step in warm-up, at least 1, skipped ones included, so that all ranks change at once.
            The variance must be a good one by then, and k a mean: at least 1 / (1 - coeff_beta).
        betas: decay of the two running means, in [0, 1).
        eps: added to the square roots.
        weight_decay: weight of the parameter in u.
        max_coeff: greatest ratio c.
        min_coeff: least ratio c.
        coeff_beta: decay of the running mean of the ratios, in [0, 1).
        factor_max: greatest factor f.
        factor_min: least factor f.
        factor_threshold: how much of itself f may change by from one update to the next, from 1 in the first.
        exp_avg_mask: as in `onebit_adam`.

    Each parameter has scales of its own, so that momenta need none of the `scaling_coeff` by which the paper and
    DeepSpeed bring those of all parameters to one size for one common scale. That differs from DeepSpeed's class where
    it has several parameters; with one they agree bit for bit.

    Elements without a variance move as in `onebit_adam`. Torch operators update all parameters. Composes as
    `onebit_adam` does, and is refused where that is.

    Raises `OptimizerError` for a value out of range, for a pattern that no parameter has, and for a mask of a shape
    that does not expand to its parameter's.
    Source: Li et al. 2021, arXiv:2104.06069, algorithm 1; r, the clamps and the order of operations are DeepSpeed's.

    >>> onebit_lamb(3e-4, freeze_step=1000)
    onebit_lamb(lr=0.0003, freeze_step=1000)
    """
    masks = Masks.of("onebit_lamb", exp_avg_mask)
    call = Call.of(
        onebit_lamb,
        {**locals(), "exp_avg_mask": masks.by_pattern or None},
        below={"coeff_beta": 1.0},
        min_coeff="max_coeff",
        factor_min="factor_max",
    )
    rule = Rule(
        call,
        _onebit_lamb,
        slots={**_MOMENTS, "exp_avg_sq_fresh": 0.0},
        numbers={"lamb_coeff_freeze": 0.0, "last_factor": 1.0},
        keep_empty=True,
        check=masks.check_shapes,
    )
    return _optimizer_of(rule, AfterWarmUp(freeze_step))


def _onebit_lamb(params: Tensors, grads: Tensors, opt: Slots, now: Now) -> None:
    lr, beta1, beta2, weight_decay = now.read("lr", "beta1", "beta2", "weight_decay")
    eps, coeff_beta = now.read("eps", "coeff_beta")
    grads = now.unscale(grads)
    slots = [opt[slot] for slot in ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh", "lamb_coeff_freeze", "last_factor")]
    if now.exchange is None:
        for p, g, m, v, w, k, _ in zip(params, grads, *slots, strict=True):
            write_moments(m, v, g, now)
            now.write(w, v)
            u = (widen(m) / widen(v).sqrt().add_(eps)).add_(p * weight_decay)
            c, has_ratio = _ratio(p, u, now)
            now.write(k, torch.where(has_ratio, coeff_beta * k + (1 - coeff_beta) * c, k))
            now.write(p, (widen(p) - u.mul_(lr * c)).to(p.dtype))
        return
    sums = send_momenta(grads, opt, now)
    for p, new, m, v, w, k, last in zip(params, sums, *slots, strict=True):
        g = (new - widen(m) * beta1).div_(1 - beta1)  # the mean gradient, as the messages show it
        now.write(m, new.to(m.dtype))
        now.write(w, torch.addcmul(widen(w) * beta2, g * (1 - beta2), g).to(w.dtype))
        root = widen(v).sqrt().add_(eps)
        u = widen(m) / root
        before = _norm(u)
        u.add_(p * weight_decay)
        factor = _factor(root, widen(w).sqrt().add_(eps), _quotient(before, _norm(u)), last, now)
        now.write(last, factor)
        now.write(p, (widen(p) - u.mul_(lr * (torch.where(k > 0, k, 1.0) * factor))).to(p.dtype))


def _ratio(p: Tensor, u: Tensor, now: Now) -> tuple[Tensor, Tensor]:
    """Return the ratio c of a parameter (n,) and its update, () float64, and whether there is one, () bool."""
    p_norm, u_norm = _norm(p), _norm(u)
    has_ratio = (p_norm > 0) & (u_norm > 0)
    c = (p_norm / u_norm).double().clamp(*now.read("min_coeff", "max_coeff"))
    return torch.where(has_ratio, c, 1.0), has_ratio


def _factor(root: Tensor, fresh: Tensor, share: Tensor, last: Tensor, now: Now) -> Tensor:
    """Return the factor () float64, given both roots (n,), the share of u that is not decay, and the last one."""
    threshold = now.values["factor_threshold"]
    most = (root / fresh).max().double() if root.numel() else torch.ones_like(last)
    factor = (most * share + (1 - share)).clamp(*now.read("factor_min", "factor_max"))
    return factor.clamp(last * (1 - threshold), last * (1 + threshold))


def _norm(x: Tensor) -> Tensor:
    return widen(x).square().sum().sqrt()


def _quotient(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole () as float64, at most 1, and 1 where the whole is 0."""
    return torch.where(whole > 0, (part / whole).double().clamp(max=1.0), 1.0)


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
    call = Call.of(zero_one_adam, {**locals(), "exp_avg_mask": masks.by_pattern or None})
    phases = GrowingIntervals(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper)
    rule = Rule(call, partial(_zero_one_adam, phases=phases), slots=_MOMENTS, check=masks.check_shapes)
    return _optimizer_of(rule, phases)


def _zero_one_adam(params: Tensors, grads: Tensors, opt: Slots, now: Now, *, phases: GrowingIntervals) -> None:
    lr, beta1, weight_decay, eps = now.read("lr", "beta1", "weight_decay", "eps")
    grads, momenta, variances = now.unscale(grads), opt["exp_avg"], opt["exp_avg_sq"]
    if now.exchange is not None and now.exchange.calls >= phases.var_freeze_step:
        _step_locally(params, grads, opt, now)
        if phases.agrees(now.exchange.calls):
            _agree(params, opt, now)
        return
    if now.exchange is None:
        for g, m, v in zip(grads, momenta, opt["exp_avg_sq"], strict=True):
            write_moments(m, v, g, now)
    else:
        for m, g in zip(momenta, sum_in_signs(map(widen, grads), opt, now), strict=True):
            now.write(m, plus(m * beta1, g.to(m.dtype), 1 - beta1))
    for p, m, v in zip(params, momenta, variances, strict=True):
        u = m / v.sqrt().add_(eps)
        now.write(p, p - u.add_(p * weight_decay).mul_(lr))


def _step_locally(params: Tensors, grads: Tensors, opt: Slots, now: Now) -> None:
    """Take a step of this rank's own: of its momentum and update the state has shares, which add up to means."""
    assert now.exchange is not None
    lr, beta1, weight_decay, eps = now.read("lr", "beta1", "weight_decay", "eps")
    size = now.exchange.size
    names = ("exp_avg", "exp_avg_sq", LOCAL_MOMENTUM, LOCAL_UPDATE)
    for p, g, m, v, share, u in zip(params, grads, *(opt[name] for name in names), strict=True):
        share += widen(m) / size  # one of the two is 0
        now.write(m, torch.zeros_like(m))
        share.copy_(plus(share * beta1, widen(g), 1 - beta1)).mul_(v > 0)
        step = share / widen(v).sqrt().add(eps)
        u -= step.add_(widen(add_update(p, u, size)) * weight_decay / size).mul_(lr)
    now.exchange.lr.add_(lr)


def _agree(params: Tensors, opt: Slots, now: Now) -> None:
    """Move the parameters by the mean over ranks of their updates, and let all begin anew there."""
    assert now.exchange is not None
    roots = [widen(v).sqrt().add(now.values["eps"]) for v in opt["exp_avg_sq"]]
    updates = (u * root for u, root in zip(opt[LOCAL_UPDATE], roots, strict=True))
    lr = now.exchange.lr
    for p, m, root, x in zip(params, opt["exp_avg"], roots, sum_in_signs(updates, opt, now), strict=True):
        now.write(m, torch.where(lr == 0, 0, -(x / lr)).to(m.dtype))
        now.write(p, (widen(p) + x / root).to(p.dtype))
    for mine in (*opt[LOCAL_MOMENTUM], *opt[LOCAL_UPDATE], lr):
        mine.zero_()


def write_moments(m: Tensor, v: Tensor, g: Tensor, now: Now) -> None:
    """Write the next momentum and variance (n,) in a call in which g (n,) is the whole gradient."""
    beta1, beta2 = now.read("beta1", "beta2")
    now.write(m, plus(m * beta1, g, 1 - beta1))
    now.write(v, torch.addcmul(v * beta2, g * (1 - beta2), g))


def sum_in_signs(terms: Iterable[Tensor], opt: Slots, now: Now) -> Iterator[Tensor]:
    """Return the sums over ranks of a tensor for each parameter, sent in signs, by masks: all that optimizers send.

    `opt` has the variance, and the errors, which are written over. Where the variance is 0 sums are too: that element
    had no gradient in warm-up.
    """
    assert now.exchange is not None
    sums = signed_sums(now.exchange.axis, terms, opt[WORKER], opt[SERVER])
    moving = (total.mul_(v > 0) for total, v in zip(sums, opt["exp_avg_sq"], strict=True))
    masks = now.values["masks"]
    return (masks.masked(total, segment) for total, (segment,) in zip(moving, now.segments, strict=True))


def send_momenta(grads: Tensors, opt: Slots, now: Now) -> Iterator[Tensor]:
    """Return the mean over ranks of beta1 * m + (1 - beta1) * g, sent in signs, as float32 where m is narrower."""
    assert now.exchange is not None
    beta1 = now.values["beta1"]
    share = beta1 / now.exchange.size  # of the momentum that all ranks have: the shares add up, as gradients do
    return sum_in_signs(
        (plus(widen(m) * share, widen(g), 1 - beta1) for g, m in zip(grads, opt["exp_avg"], strict=True)), opt, now
    )


def widen(x: Tensor) -> Tensor:
    """Return x, as float32 if it is narrower."""
    return x.float() if x.dtype.itemsize < 4 else x


def plus(x: Tensor, y: Tensor, factor: float | Tensor) -> Tensor:
    """Return x + factor * y, in one rounding where the factor is on the host."""
    return x.add_(y * factor) if isinstance(factor, Tensor) else x.add_(y, alpha=factor)
