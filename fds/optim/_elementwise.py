"""Optimizers that treat every element by itself: `sgd`, `adam` and `adamw`, `lion`, `adagrad`."""

from __future__ import annotations

from math import inf

import torch

from fds import kernels, reading
from fds.errors import OptimizerError, checked_call
from fds.optim.assembly import Call, Now, Rule, Slots, Tensors, lerp
from fds.optim.base import LRSchedule, Optimizer, one_dimensional
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
    call = Call.of(sgd, locals())
    if nesterov and (momentum == 0 or dampening != 0):
        raise OptimizerError(
            "sgd: nesterov needs momentum and no dampening",
            where="nesterov",
            got=call.text,
            want="sgd(momentum=0.9, nesterov=True)",
            hint="leave out nesterov, or dampening",
        )
    dampened = momentum != 0 and dampening != 0
    return Rule(
        call,
        _sgd,
        slots={"momentum_buffer": 0.0} if momentum != 0 else {},
        kernel=lambda now: (kernels.sgd, {"step": now.step}),
        fused=lambda device: device.type == "cpu" or not dampened,
    ).optimizer(elementwise=True)


def _sgd(params: Tensors, grads: Tensors, opt: Slots, now: Now) -> None:
    momentum, weight_decay, dampening, nesterov = now.read("momentum", "weight_decay", "dampening", "nesterov")
    buffers = opt.get("momentum_buffer", [])
    # torch's fused function needs to know whether this is the first update. A CPU tensor can be read at no cost; on an
    # accelerator a buffer of zeros gives the same result without dampening. At momentum 0 it does not write the buffer.
    on_host, is_free = now.step.device.type == "cpu", reading.is_free(now.step)
    dampened = bool(buffers) and dampening != 0
    low = [on_host and is_low(p) for p in params]  # torch 2.13's fused function is wrong for 16 elements and more
    if any(low) and not all(low):
        for kind in (True, False):
            pick = lambda xs, kind=kind: [x for x, is_kind in zip(xs, low, strict=True) if is_kind is kind]
            slots = {slot: pick(xs) for slot, xs in opt.items()}
            _sgd(pick(params), pick(grads), slots, now)
        return None
    fits = now.static("momentum", "weight_decay") and not (buffers and momentum == 0) and (is_free or not dampened)
    if any(low) or not fits:
        return _sgd_formula(params, grads, opt, now)
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


def _sgd_formula(params: Tensors, grads: Tensors, opt: Slots, now: Now) -> None:
    lr, momentum, weight_decay = now.read("lr", "momentum", "weight_decay")
    dampening, nesterov = now.read("dampening", "nesterov")
    weight = 1 - dampening * (now.step != 0).double()
    buffers = opt.get("momentum_buffer", [None] * len(params))
    for p, g, b in zip(params, now.unscale(grads), buffers, strict=True):
        g.add_(p * weight_decay)
        if b is not None:
            now.write(b, (b * momentum).add_(g * weight))
            g = g.add_(b * momentum) if nesterov else b
        now.write(p, p - g * lr)


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
    return _adam_family(Call.of(adam, {**locals(), "decoupled": False}))


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
    return _adam_family(Call.of(adamw, {**locals(), "decoupled": True}))


def _adam_family(call: Call) -> Optimizer:
    return Rule(
        call,
        _adam,
        slots={"exp_avg": 0.0, "exp_avg_sq": 0.0},
        kernel=lambda now: (kernels.adamw, {"step": now.step}),
        fused=lambda device: True,
    ).optimizer(elementwise=True, takes_shapes=True)


def _adam(params: Tensors, grads: Tensors, opt: Slots, now: Now) -> None:
    eps, bias_correction, decoupled = now.read("eps", "bias_correction", "decoupled")
    static = now.static("beta1", "beta2", "weight_decay")
    if not static or now.step.device.type != "cpu":  # torch's fused function takes any shapes on the CPU alone
        grads = one_dimensional(grads)
    if not static:
        return _adam_formula(params, grads, opt, now)
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


def _adam_formula(params: Tensors, grads: Tensors, opt: Slots, now: Now) -> None:
    lr, beta1, beta2, weight_decay = now.read("lr", "beta1", "beta2", "weight_decay")
    eps, bias_correction, decoupled = now.read("eps", "bias_correction", "decoupled")
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


@checked_call
def lion(
    lr: LRSchedule = 1e-4, betas: tuple[LRSchedule, LRSchedule] = (0.9, 0.99), weight_decay: LRSchedule = 0.0
) -> Optimizer:
    """Move every element by lr against the sign of its momentum.

    Element by element::

        u = sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g
        p = p - lr * (u + weight_decay * p)

    Slot: exp_avg (m).

    Args:
        lr: learning rate, a third to a tenth of AdamW's; it, the betas and weight_decay may be schedules f(t).
        betas: weight of the momentum in the direction, and in its own update, in [0, 1).
        weight_decay: decoupled, three to ten times AdamW's.

    Torch operators update all parameters. On a GPU a kernel of fds can, float32 and 16-bit ones in one launch, where it
    is chosen (`fds.kernels.chosen`), unless a beta or weight_decay follows a schedule.

    Raises `OptimizerError` for a value out of range.
    Source: Chen et al. 2023, arXiv:2302.06675, algorithm 2.

    >>> lion(betas=(0.95, 0.98))
    lion(lr=0.0001, betas=(0.95, 0.98))
    """
    rule = Rule(Call.of(lion, locals()), _lion, slots={"exp_avg": 0.0}, kernel=lambda now: (kernels.lion, {}))
    return rule.optimizer(elementwise=True)


def _lion(params: Tensors, grads: Tensors, opt: Slots, now: Now) -> None:
    lr, beta1, beta2, weight_decay = now.read("lr", "beta1", "beta2", "weight_decay")
    for p, g, m in zip(params, now.unscale(grads), opt["exp_avg"], strict=True):
        direction = lerp(m, g, 1 - beta1).sign_()
        now.write(m, lerp(m, g, 1 - beta2))
        now.write(p, (p * (1 - lr * weight_decay)).sub_(direction.mul_(lr)))


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
    call, slots = Call.of(adagrad, locals()), {"sum": initial_accumulator_value}
    return Rule(call, _adagrad, slots=slots, fused=lambda device: True).optimizer(elementwise=True)


def _adagrad(params: Tensors, grads: Tensors, opt: Slots, now: Now) -> None:
    weight_decay, lr_decay, eps = now.read("weight_decay", "lr_decay", "eps")
    if not now.static("weight_decay"):
        return _adagrad_formula(params, grads, opt, now)
    lists = [params, grads, opt["sum"], [now.updates().float()] * len(params)]
    return now.fused(torch.ops.aten._fused_adagrad_, lists, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)


def _adagrad_formula(params: Tensors, grads: Tensors, opt: Slots, now: Now) -> None:
    lr, weight_decay, lr_decay, eps = now.read("lr", "weight_decay", "lr_decay", "eps")
    rate = lr / (1 + now.step.double() * lr_decay)
    for p, g, s in zip(params, now.unscale(grads), opt["sum"], strict=True):
        g.add_(p * weight_decay)
        now.write(s, s + g.square())
        now.write(p, p - g.div_(s.sqrt().add_(eps)).mul_(rate))
