"""Stochastic gradient descent, plain or with momentum."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fds import reading
from fds.errors import OptimizerError, checked_call
from fds.optim.arguments import call_text, check_numbers
from fds.optim.assembly import Now, assemble
from fds.optim.base import LRSchedule, Optimizer
from fds.tree import is_low


@checked_call
def sgd(
    lr: LRSchedule = 1e-3,
    momentum: LRSchedule = 0.0,
    weight_decay: LRSchedule = 0.0,
    *,
    dampening: float = 0.0,
    nesterov: bool = False,
) -> Optimizer:
    """Subtract the gradient, or a decaying sum of gradients, times the learning rate.

    Element by element, with b = g at t = 0::

        g = g + weight_decay * p
        b = momentum * b + (1 - dampening) * g
        p = p - lr * b                              nesterov: p - lr * (g + momentum * b)

    Slot: momentum_buffer (b), only where momentum is not the constant 0 (then p = p - lr * g).

    Args:
        lr: learning rate; it, momentum and weight_decay may be schedules f(t).
        momentum: decay of the sum b.
        weight_decay: L2 penalty.
        dampening: reduces the weight of the gradient in b, after the first update.
        nesterov: use Nesterov momentum.

    Torch's fused function updates all parameters, on a CPU those of float32 and float64. On a GPU a kernel of fds can,
    float32 and 16-bit ones in one launch, where it is chosen (`fds.kernels.chosen`); if momentum or weight_decay
    follows a schedule, torch operators do.

    Raises `OptimizerError` for a value out of range, and for nesterov without momentum or with dampening.
    Source: Polyak 1964; Sutskever et al. 2013, ICML, section 2; the form is torch.optim.SGD's.

    >>> sgd(0.1, momentum=0.9)
    sgd(lr=0.1, momentum=0.9)
    """
    text = call_text(sgd, locals())
    check_numbers("sgd", lr=lr, momentum=momentum, weight_decay=weight_decay)
    check_numbers("sgd", dampening=dampening, schedule=False)
    if nesterov and (momentum == 0 or dampening != 0):
        raise OptimizerError(
            "sgd: nesterov needs momentum and no dampening",
            where="nesterov",
            got=text,
            want="sgd(momentum=0.9, nesterov=True)",
            hint="leave out nesterov, or dampening",
        )
    hyper = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    slots = {"momentum_buffer": 0.0} if momentum != 0 else {}
    fixed = {"dampening": dampening, "nesterov": nesterov}
    dampened = momentum != 0 and dampening != 0
    return assemble(
        partial(_rule, **fixed),
        text=text,
        hyper=hyper,
        slots=slots,
        elementwise=True,
        kernel=partial(_kernel, **fixed),
        fused=lambda device: device.type == "cpu" or not dampened,
    )


def _kernel(
    params: list[Tensor],
    grads: list[Tensor],
    opt: dict[str, list[Tensor]],
    now: Now,
    out: list[Tensor | None],
    *,
    dampening: float,
    nesterov: bool,
) -> None:
    from fds.kernels.optimizers import sgd_update  # loads Triton, so only where it runs

    momentum, weight_decay = now.read("momentum", "weight_decay")
    sgd_update.sgd(
        params,
        grads,
        opt.get("momentum_buffer"),
        step=now.step,
        momentum=momentum,
        weight_decay=weight_decay,
        dampening=dampening,
        nesterov=nesterov,
        out=out,
        **now.read_on_device(),
    )


def _rule(
    params: list[Tensor],
    grads: list[Tensor],
    opt: dict[str, list[Tensor]],
    now: Now,
    *,
    dampening: float,
    nesterov: bool,
) -> None:
    momentum, weight_decay = now.read("momentum", "weight_decay")
    buffers = opt.get("momentum_buffer", [])
    # torch's fused function needs to know whether this is the first update. A CPU tensor can be read at no cost; on an
    # accelerator a buffer of zeros gives the same result without dampening. At momentum 0 it does not write the buffer.
    on_host, is_free = now.step.device.type == "cpu", reading.is_free(now.step)
    dampened = bool(buffers) and dampening != 0
    low = [on_host and is_low(p) for p in params]  # torch 2.13's fused function is wrong for 16 elements and more
    if any(low) and not all(low):
        for kind in (True, False):
            some = lambda xs, kind=kind: [x for x, is_kind in zip(xs, low, strict=True) if is_kind is kind]
            slots = {slot: some(xs) for slot, xs in opt.items()}
            _rule(some(params), some(grads), slots, now, dampening=dampening, nesterov=nesterov)
        return None
    fits = now.static("momentum", "weight_decay") and not (buffers and momentum == 0) and (is_free or not dampened)
    if any(low) or not fits:
        return _formula(params, grads, opt, now, dampening=dampening, nesterov=nesterov)
    now.fused(
        torch.ops.aten._fused_sgd_,
        [params, grads, buffers],
        momentum=momentum,
        weight_decay=weight_decay,
        dampening=dampening,
        nesterov=nesterov,
        is_first_step=is_free and int(now.step) == 0,
    )
    return None


def _formula(
    params: list[Tensor],
    grads: list[Tensor],
    opt: dict[str, list[Tensor]],
    now: Now,
    *,
    dampening: float,
    nesterov: bool,
) -> None:
    lr, momentum, weight_decay = now.read("lr", "momentum", "weight_decay")
    weight = 1 - dampening * (now.step != 0).double()
    buffers = opt.get("momentum_buffer", [None] * len(params))
    for p, g, b in zip(params, now.unscale(grads), buffers, strict=True):
        g.add_(p * weight_decay)
        if b is not None:
            now.write(b, (b * momentum).add_(g * weight))
            g = g.add_(b * momentum) if nesterov else b
        now.write(p, p - g * lr)
