"""Adagrad: learning rates that fall with the sum of squared gradients."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fds.errors import checked_call
from fds.optim.arguments import call_text, check_numbers
from fds.optim.assembly import Now, assemble
from fds.optim.base import LRSchedule, Optimizer


@checked_call
def adagrad(
    lr: LRSchedule = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: LRSchedule = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> Optimizer:
    """Divide each gradient by the root of the sum of its squares so far.

    Element by element::

        g = g + weight_decay * p
        s = s + g^2
        p = p - lr / (1 + t * lr_decay) * g / (sqrt(s) + eps)

    Slot: sum (s).

    Args:
        lr: learning rate; it and weight_decay may be schedules f(t).
        lr_decay: decay of the learning rate.
        weight_decay: L2 penalty.
        initial_accumulator_value: s before the first update.
        eps: added to the square root.

    Raises `OptimizerError` for a value out of range.
    Source: Duchi, Hazan and Singer 2011, JMLR 12, section 1.1; the form is torch.optim.Adagrad's.

    >>> adagrad(lr=0.1)
    adagrad(lr=0.1)
    """
    text = call_text(adagrad, locals())
    slots = {"sum": initial_accumulator_value}
    check_numbers("adagrad", lr=lr, weight_decay=weight_decay)
    check_numbers("adagrad", schedule=False, lr_decay=lr_decay, initial_accumulator_value=slots["sum"], eps=eps)
    hyper = {"lr": lr, "weight_decay": weight_decay}
    rule = partial(_rule, lr_decay=lr_decay, eps=eps)
    return assemble(rule, text=text, hyper=hyper, slots=slots, elementwise=True, fused=lambda device: True)


def _rule(
    params: list[Tensor], grads: list[Tensor], opt: dict[str, list[Tensor]], now: Now, *, lr_decay: float, eps: float
) -> None:
    if not now.static("weight_decay"):
        return _formula(params, grads, opt, now, lr_decay=lr_decay, eps=eps)
    lists = [params, grads, opt["sum"], [now.updates().float()] * len(params)]
    (weight_decay,) = now.read("weight_decay")
    now.fused(torch.ops.aten._fused_adagrad_, lists, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)


def _formula(
    params: list[Tensor], grads: list[Tensor], opt: dict[str, list[Tensor]], now: Now, *, lr_decay: float, eps: float
) -> None:
    lr, weight_decay = now.read("lr", "weight_decay")
    rate = lr / (1 + now.step.double() * lr_decay)
    for p, g, s in zip(params, now.unscale(grads), opt["sum"], strict=True):
        g.add_(p * weight_decay)
        now.write(s, s + g.square())
        now.write(p, p - g.div_(s.sqrt().add_(eps)).mul_(rate))
