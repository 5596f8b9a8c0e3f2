"""1-bit LAMB: LAMB for some steps; then its variance and ratios stay, and ranks send the signs of their momentum."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import attrs
import torch
from torch import Tensor

from fds.errors import OptimizerError, checked_call
from fds.optim.arguments import call_text, check_betas, check_numbers
from fds.optim.assembly import Now, assemble
from fds.optim.base import LRSchedule, Optimizer
from fds.optim.masks import Masks
from fds.optim.momentum import AfterWarmUp, sent_momenta, summed_moments, wide


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
        exp_avg_mask: shell-style pattern of names -> tensor that the momentum is multiplied by after each message, of
            a shape that expands to the parameter's: 0 where gradients are 0 from some call on (rows of an embedding
            that are not used any more), which a sign cannot say.

    Each parameter has scales of its own, so that momenta need none of the `scaling_coeff` by which the paper and
    DeepSpeed bring those of all parameters to one size for one common scale. That differs from DeepSpeed's class where
    it has several parameters; with one they agree bit for bit.

    An element that had no gradient in warm-up has no variance, and moves by its decay alone: a step by a sign over eps
    would throw it away. Where all calls of warm-up are skipped that is every element, and `metrics["step"]` is 0 then.

    Torch operators update all parameters. Composes with `shard_optimizer(stage=0)`, also with replicas, pipelines,
    accumulation, precision, loss scales and `clip_by_global_norm`, which after warm-up goes by the norm of each rank's
    own gradient: then nobody has the whole one, so that other maps of it, slices of it (stages 1 to 3), offload and
    graphs of the step are refused, and no `grad_norm` is reported.

    Raises `OptimizerError` for a value out of range, for a pattern that no parameter has, and for a mask of a shape
    that does not expand to its parameter's.
    Source: Li et al. 2021, arXiv:2104.06069, algorithm 1; r, the clamps and the order of operations are DeepSpeed's.

    >>> onebit_lamb(3e-4, freeze_step=1000)
    onebit_lamb(lr=0.0003, freeze_step=1000)
    """
    given, masks = dict(locals()), Masks.of("onebit_lamb", exp_avg_mask)
    text = call_text(onebit_lamb, {**given, "exp_avg_mask": masks.by_pattern or None})
    check_numbers("onebit_lamb", lr=lr, weight_decay=weight_decay)
    check_numbers("onebit_lamb", schedule=False, eps=eps, min_coeff=min_coeff, max_coeff=max_coeff)
    factors = {"factor_min": factor_min, "factor_max": factor_max, "factor_threshold": factor_threshold}
    check_numbers("onebit_lamb", schedule=False, **factors)
    check_numbers("onebit_lamb", schedule=False, high=1.0, coeff_beta=coeff_beta)
    check_betas("onebit_lamb", betas)
    for least, most in (("min_coeff", "max_coeff"), ("factor_min", "factor_max")):
        low, high = given[least], given[most]
        if low > high:
            raise OptimizerError(
                f"onebit_lamb: {least} is larger than {most}",
                where=least,
                got=f"{least}={low}, {most}={high}",
                want=f"{least} <= {most}",
                hint="swap them",
            )
    optimizer = assemble(
        partial(
            _rule,
            eps=eps,
            masks=masks,
            ratios=_Ratios((min_coeff, max_coeff), coeff_beta, (factor_min, factor_max), factor_threshold),
        ),
        text=text,
        hyper={"lr": lr, "beta1": betas[0], "beta2": betas[1], "weight_decay": weight_decay},
        slots={"exp_avg": 0.0, "exp_avg_sq": 0.0, "exp_avg_sq_fresh": 0.0},
        numbers={"lamb_coeff_freeze": 0.0, "last_factor": 1.0},
        whole=True,
        keep_empty=True,
        check=masks.check_shapes,
        phases=AfterWarmUp.of("onebit_lamb", freeze_step),
    )
    return attrs.evolve(optimizer, check=masks.check_names)


def _rule(
    params: list[Tensor],
    grads: list[Tensor],
    opt: dict[str, list[Tensor]],
    now: Now,
    *,
    eps: float,
    ratios: _Ratios,
    masks: Masks,
) -> None:
    lr, beta1, beta2, weight_decay = now.read("lr", "beta1", "beta2", "weight_decay")
    grads = now.unscale(grads)
    held = [opt[slot] for slot in ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh", "lamb_coeff_freeze", "last_factor")]
    if now.exchange is None:
        for p, g, m, v, w, k, _ in zip(params, grads, *held, strict=True):
            for old, new in zip((m, v), summed_moments(m, v, g, beta1, beta2), strict=True):
                now.write(old, new)
            now.write(w, v)
            u = (wide(m) / wide(v).sqrt().add_(eps)).add_(p * weight_decay)
            c, known = ratios.of(p, u)
            now.write(k, torch.where(known, ratios.coeff_beta * k + (1 - ratios.coeff_beta) * c, k))
            now.write(p, (wide(p) - u.mul_(lr * c)).to(p.dtype))
        return
    sums = sent_momenta(grads, opt, now, beta1, masks)
    for p, new, m, v, w, k, last in zip(params, sums, *held, strict=True):
        g = (new - wide(m) * beta1).div_(1 - beta1)  # the mean gradient, as the messages show it
        now.write(m, new.to(m.dtype))
        now.write(w, torch.addcmul(wide(w) * beta2, g * (1 - beta2), g).to(w.dtype))
        root = wide(v).sqrt().add_(eps)
        u = wide(m) / root
        before = _norm(u)
        u.add_(p * weight_decay)
        factor = ratios.factor(root, wide(w).sqrt().add_(eps), _quotient(before, _norm(u)), last)
        now.write(last, factor)
        now.write(p, (wide(p) - u.mul_(lr * (torch.where(k > 0, k, 1.0) * factor))).to(p.dtype))


@attrs.frozen
class _Ratios:
    """How the rate of a parameter follows norms in warm-up, and its variance afterwards."""

    coeffs: tuple[float, float]  # least and greatest
    coeff_beta: float
    factors: tuple[float, float]
    threshold: float

    def of(self, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ratio c of a parameter (n,) and its update, () float64, and whether there is one, () bool."""
        p_norm, u_norm = _norm(p), _norm(u)
        known = (p_norm > 0) & (u_norm > 0)
        return torch.where(known, (p_norm / u_norm).double().clamp(*self.coeffs), 1.0), known

    def factor(self, root: Tensor, fresh: Tensor, share: Tensor, last: Tensor) -> Tensor:
        """Return the factor () float64, given both roots (n,), the share of u that is not decay, and the last one."""
        most = (root / fresh).max().double() if root.numel() else torch.ones_like(last)
        factor = (most * share + (1 - share)).clamp(*self.factors)
        return factor.clamp(last * (1 - self.threshold), last * (1 + self.threshold))


def _norm(x: Tensor) -> Tensor:
    return wide(x).square().sum().sqrt()


def _quotient(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole () as float64, at most 1, and 1 where the whole is 0."""
    return torch.where(whole > 0, (part / whole).double().clamp(max=1.0), 1.0)
