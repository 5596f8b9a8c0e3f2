"""LAMB: Adam's direction, scaled to the norm of each parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fds import kernels
from fds.errors import checked_call
from fds.optim.assembly import Call, Now, Rule, Slots, Tensors, lerp
from fds.optim.base import LRSchedule, Optimizer


@checked_call
def lamb(
    lr: LRSchedule = 1e-3,
    betas: tuple[LRSchedule, LRSchedule] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: LRSchedule = 0.0,
    *,
    min_coeff: float = 0.01,
    max_coeff: float = 10.0,
    bias_correction: bool = True,
    eps_inside_sqrt: bool = False,
) -> Optimizer:
    """Make the update of each parameter proportional to the norm of the parameter.

    With n = t + 1, and norms over one whole parameter::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2
        u = m / (sqrt(v) + eps) + weight_decay * p          eps_inside_sqrt: m / sqrt(v + eps)
        c = clamp(|p| / |u|, min_coeff, max_coeff)          1 where either norm is 0
        p = p - rate * c * u                                rate = lr * sqrt(1 - beta2^n) / (1 - beta1^n)

    Slots: exp_avg (m), exp_avg_sq (v).

    Args:
        lr: learning rate; it, the betas and weight_decay may be schedules f(t).
        betas: decay of the two running means, in [0, 1).
        eps: added to the square root, or inside it.
        weight_decay: weight of the parameter in u.
        min_coeff: least trust ratio c.
        max_coeff: greatest trust ratio c.
        bias_correction: False takes rate = lr.
        eps_inside_sqrt: True adds eps inside the square root.

    Torch operators update all parameters. On a GPU kernels of fds can, float32 and 16-bit ones in three launches, where
    they are chosen (`fds.kernels.chosen`), unless a beta or weight_decay follows a schedule.

    Raises `OptimizerError` for a value out of range.
    Source: You et al. 2020, arXiv:1904.00962, algorithm 2; clamping and the correction of the rate rather
    than of the moments are DeepSpeed's FusedLamb.

    >>> lamb(max_coeff=5.0)
    lamb(lr=0.001, max_coeff=5.0)
    """
    return Rule(
        Call.of(lamb, locals(), min_coeff="max_coeff"),
        _rule,
        slots={"exp_avg": 0.0, "exp_avg_sq": 0.0},
        keep_empty=True,
        kernel=_kernel,
    ).optimizer()


def _kernel(now: Now) -> tuple[Callable[..., None], dict[str, Any]]:
    def summed(both: Tensor) -> Tensor:
        for axis in now.axes:
            both = axis.all_reduce(both, what="optimizer")
        return both

    segments = [[(s.offset, s.length) for s in inside] for inside in now.segments]
    return kernels.lamb, {"step": now.step, "segments": segments, "reduce": summed}


def _rule(params: Tensors, grads: Tensors, opt: Slots, now: Now) -> None:
    lr, beta1, beta2, weight_decay = now.read("lr", "beta1", "beta2", "weight_decay")
    eps, bias_correction, eps_inside_sqrt = now.read("eps", "bias_correction", "eps_inside_sqrt")
    for p, g, m, v in zip(params, now.unscale(grads), opt["exp_avg"], opt["exp_avg_sq"], strict=True):
        now.write(m, lerp(m, g, 1 - beta1))
        now.write(v, lerp(v, g.square_(), 1 - beta2))
        root = (v + eps).sqrt_() if eps_inside_sqrt else v.sqrt().add_(eps)
        torch.div(m, root, out=g).add_(p * weight_decay)  # from here on the gradient's memory holds u

    n = now.updates()
    rate = lr * (1 - beta2**n).sqrt() / (1 - beta1**n) if bias_correction else lr
    places = [(segment, i) for i, segments in enumerate(now.segments) for segment in segments]
    for (segment, i), trust in zip(places, _trust(params, grads, now), strict=True):
        segment.of(grads[i]).mul_(trust * rate)
    for p, u in zip(params, grads, strict=True):
        now.write(p, p - u)


def _trust(params: Tensors, updates: Tensors, now: Now) -> Tensors:
    """Return the coefficient c of every segment, () each, from two norms per segment and one all-reduce."""

    def squares(flats: Tensors) -> Tensor:
        views = [s.of(flat) for flat, segments in zip(flats, now.segments, strict=True) for s in segments]
        return torch.stack([norm.double().square() for norm in torch.ops.aten._foreach_norm(views)])

    if not any(now.segments):
        return []
    both = torch.stack([squares(params), squares(updates)])
    for axis in now.axes:
        both = axis.all_reduce(both, what="optimizer")
    p_norm, u_norm = both.sqrt()
    ratio = (p_norm / u_norm).clamp(*now.read("min_coeff", "max_coeff"))
    return list(torch.where((p_norm > 0) & (u_norm > 0), ratio, 1.0))
