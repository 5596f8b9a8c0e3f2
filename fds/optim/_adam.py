"""Adam, with weight decay in the gradient (`adam`) or decoupled (`adamw`)."""

from __future__ import annotations

from functools import partial
from math import inf

import torch
from torch import Tensor

from fds.errors import checked_call
from fds.optim.arguments import call_text, check_betas, check_numbers
from fds.optim.assembly import Now, assemble, lerp
from fds.optim.base import LRSchedule, Optimizer, one_dimensional


@checked_call
def adam(
    lr: LRSchedule = 1e-3,
    betas: tuple[LRSchedule, LRSchedule] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: LRSchedule = 0.0,
    *,
    bias_correction: bool = True,
) -> Optimizer:
    """Divide the running mean of each gradient by the root of the running mean of its square.

    With n = t + 1, element by element::

        g = g + weight_decay * p
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2
        p = p - lr * (m / c1) / (sqrt(v / c2) + eps)        c1 = 1 - beta1^n, c2 = 1 - beta2^n

    Slots: exp_avg (m), exp_avg_sq (v).

    Args:
        lr: learning rate; it, the betas and weight_decay may be schedules f(t).
        betas: decay of the two running means, in [0, 1).
        eps: added to the square root.
        weight_decay: L2 penalty.
        bias_correction: False takes c1 = c2 = 1.

    Torch's fused function updates all parameters. On a GPU a kernel of fds can, float32 and 16-bit ones in one launch,
    where it is chosen (`fds.kernels.chosen`); if a beta or weight_decay follows a schedule, torch operators do.

    Raises `OptimizerError` for a value out of range.
    Source: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1.

    >>> adam(3e-4)
    adam(lr=0.0003)
    """
    return _family(call_text(adam, locals()), lr, betas, eps, weight_decay, bias_correction, decoupled=False)


@checked_call
def adamw(
    lr: LRSchedule = 1e-3,
    betas: tuple[LRSchedule, LRSchedule] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: LRSchedule = 0.01,
    *,
    bias_correction: bool = True,
) -> Optimizer:
    """Update as `adam` does, with weight decay applied to the parameters instead of the gradients.

    The first line of `adam` is replaced by p = p - lr * weight_decay * p; arguments, slots and errors are the same,
    but weight_decay is 0.01 by default.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2 (with lr in place of its two factors).

    >>> adamw(lr=3e-4, weight_decay=0.1)
    adamw(lr=0.0003, weight_decay=0.1)
    """
    return _family(call_text(adamw, locals()), lr, betas, eps, weight_decay, bias_correction, decoupled=True)


def _family(
    text: str,
    lr: LRSchedule,
    betas: tuple[LRSchedule, LRSchedule],
    eps: float,
    weight_decay: LRSchedule,
    bias_correction: bool,
    decoupled: bool,
) -> Optimizer:
    name = text.partition("(")[0]
    check_numbers(name, lr=lr, weight_decay=weight_decay)
    check_numbers(name, eps=eps, schedule=False)
    check_betas(name, betas)
    fixed = {"eps": eps, "bias_correction": bias_correction, "decoupled": decoupled}
    hyper = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "weight_decay": weight_decay}
    return assemble(
        partial(_rule, **fixed),
        text=text,
        hyper=hyper,
        slots={"exp_avg": 0.0, "exp_avg_sq": 0.0},
        elementwise=True,
        kernel=partial(_kernel, **fixed),
        fused=lambda device: True,
        takes_shapes=True,
    )


def _kernel(
    params: list[Tensor],
    grads: list[Tensor],
    opt: dict[str, list[Tensor]],
    now: Now,
    out: list[Tensor | None],
    *,
    eps: float,
    bias_correction: bool,
    decoupled: bool,
) -> None:
    from fds.kernels.optimizers import adam_update  # loads Triton, so only where it runs

    beta1, beta2, weight_decay = now.read("beta1", "beta2", "weight_decay")
    adam_update.adamw(
        params,
        one_dimensional(grads),
        opt["exp_avg"],
        opt["exp_avg_sq"],
        step=now.step,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        bias_correction=bias_correction,
        decoupled=decoupled,
        out=out,
        **now.read_on_device(),
    )


def _rule(
    params: list[Tensor],
    grads: list[Tensor],
    opt: dict[str, list[Tensor]],
    now: Now,
    *,
    eps: float,
    bias_correction: bool,
    decoupled: bool,
) -> None:
    static = now.static("beta1", "beta2", "weight_decay")
    if not static or now.step.device.type != "cpu":  # torch's fused function takes any shapes on the CPU alone
        grads = one_dimensional(grads)
    if not static:
        return _formula(params, grads, opt, now, eps=eps, bias_correction=bias_correction, decoupled=decoupled)
    # beta^inf = 0: an infinite count makes both corrections exactly 1.
    count = (now.step + 1).float() if bias_correction else torch.full((), inf, device=now.step.device)
    beta1, beta2, weight_decay = now.read("beta1", "beta2", "weight_decay")
    now.fused(
        torch.ops.aten._fused_adamw_ if decoupled else torch.ops.aten._fused_adam_,
        [params, grads, opt["exp_avg"], opt["exp_avg_sq"], [], [count] * len(params)],
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
    )


def _formula(
    params: list[Tensor],
    grads: list[Tensor],
    opt: dict[str, list[Tensor]],
    now: Now,
    *,
    eps: float,
    bias_correction: bool,
    decoupled: bool,
) -> None:
    lr, beta1, beta2, weight_decay = now.read("lr", "beta1", "beta2", "weight_decay")
    n = now.updates()
    correction1, correction2 = (1 - beta1**n, 1 - beta2**n) if bias_correction else (1.0, 1.0)
    shrink = 1 - lr * weight_decay if decoupled else 1.0
    for p, g, m, v in zip(params, now.unscale(grads), opt["exp_avg"], opt["exp_avg_sq"], strict=True):
        if not decoupled:
            g.add_(p * weight_decay)
        now.write(m, lerp(m, g, 1 - beta1))
        now.write(v, lerp(v, g.square_(), 1 - beta2))
        denominator = (v / correction2).sqrt_().add_(eps)
        now.write(p, (p * shrink).sub_((m / denominator).mul_(lr / correction1)))
