"""Adam and AdamW, Lion, and stochastic gradient descent, of flat slices, in place, in one pass: one kernel for all.

With g = grad / grad_scale, all (N,):

Adam, AdamW::

    m = m + (1 - beta1) * (g - m)                v = v + (1 - beta2) * (g^2 - v)
    p = p - lr * (weight_decay * p + (m / c1) / (sqrt(v / c2) + eps))

c1 = 1 - beta1^n, c2 = 1 - beta2^n, n = step + 1; 0 / 0 is 0, so that padding stays zero. Adam has g + weight_decay * p
in place of g, and no weight_decay * p in the last line.

Lion::

    u = sign(m + (1 - beta1) * (g - m))          m = m + (1 - beta2) * (g - m)
    p = p - lr * (u + weight_decay * p)

Stochastic gradient descent, with g + weight_decay * p in place of g::

    b = momentum * b + (1 - dampening) * g       b = momentum * b + g at step 0
    p = p - lr * b                               nesterov: p - lr * (g + momentum * b); no buffer: p - lr * g

Moves, per element in float32 with 16-bit gradient and copy: 28 bytes by Adam, which reads p, g, m, v and writes p, m,
v, out; 20 by Lion and with a buffer b; 12 without one.
Source: [1] Kingma and Ba 2015, arXiv:1412.6980, algorithm 1. [2] Loshchilov and Hutter 2019, arXiv:1711.05101,
algorithm 2 (with lr in place of its two factors). [3] Chen et al. 2023, arXiv:2302.06675, algorithm 2. [4] Polyak 1964;
Sutskever et al. 2013, ICML, section 2; the form is torch.optim.SGD's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fds.kernels import slices
from fds.kernels.language import jit, on, tl
from fds.kernels.slices import Columns, MaybeSlices, Slices


def adam_reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, step: Tensor, lr: Tensor,
    beta1: float, beta2: float, eps: float, weight_decay: float, bias_correction: bool = True,
    decoupled: bool = True, grad_scale: Tensor | None = None, skip: Tensor | None = None, out: Tensor | None = None,
) -> None:
    """Update by Adam or AdamW in plain torch."""
    p, g, m, v = slices.wide(param, grad, exp_avg, exp_avg_sq)
    if grad_scale is not None:
        g = g / grad_scale
    if not decoupled:
        g = g + weight_decay * p
    m = m + (1 - beta1) * (g - m)
    v = v + (1 - beta2) * (g * g - v)
    n = (step + 1).double()
    c1, c2 = (1 - beta1**n, 1 - beta2**n) if bias_correction else (1.0, 1.0)
    move = (m / c1 / ((v / c2).sqrt() + eps)).masked_fill(m == 0, 0.0)
    p = p - lr * (weight_decay * p + move if decoupled else move)
    for old, new in ((exp_avg, m), (exp_avg_sq, v), (param, p)):
        slices.write(old, new, skip)
    if out is not None:
        slices.write(out, param, skip)


def lion_reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, *, lr: Tensor, beta1: float, beta2: float, weight_decay: float,
    grad_scale: Tensor | None = None, skip: Tensor | None = None, out: Tensor | None = None,
) -> None:
    """Update by Lion in plain torch."""
    p, g, m = slices.wide(param, grad, exp_avg)
    if grad_scale is not None:
        g = g / grad_scale
    u = torch.sign(m + (1 - beta1) * (g - m))
    slices.write(exp_avg, m + (1 - beta2) * (g - m), skip)
    slices.write(param, p - lr * (u + weight_decay * p), skip)
    if out is not None:
        slices.write(out, param, skip)


def sgd_reference(
    param: Tensor, grad: Tensor, momentum_buffer: Tensor | None = None, *, step: Tensor, lr: Tensor,
    momentum: float = 0.0, weight_decay: float = 0.0, dampening: float = 0.0, nesterov: bool = False,
    grad_scale: Tensor | None = None, skip: Tensor | None = None, out: Tensor | None = None,
) -> None:
    """Update by stochastic gradient descent in plain torch."""
    p, g = slices.wide(param, grad)
    if grad_scale is not None:
        g = g / grad_scale
    g = g + weight_decay * p
    move = g
    if momentum_buffer is not None:
        b = momentum_buffer.to(p.dtype)
        b = momentum * b + (1 - dampening * (step != 0).to(p.dtype)) * g
        move = g + momentum * b if nesterov else b
        slices.write(momentum_buffer, b, skip)
    slices.write(param, p - lr * move, skip)
    if out is not None:
        slices.write(out, param, skip)


@jit
def _adam(
    p, g, m_ptr, v_ptr, at, inside, mask, step_ptr, lr, weight_decay, fresh1, fresh2, log_beta1, log_beta2, eps,
    DECOUPLED: tl.constexpr,
):
    m, v = slices.load(m_ptr, at, inside), slices.load(v_ptr, at, inside)
    n = tl.load(step_ptr) + 1
    rate = lr / slices.correction(n, log_beta1)
    root = 1 / tl.sqrt(slices.correction(n, log_beta2))
    if not DECOUPLED:
        g += weight_decay * p
    m = slices.blend(m, g, fresh1)
    v = slices.blend(v, g * g, fresh2)
    move = rate * m / tl.where(m == 0, 1, tl.sqrt(v) * root + eps)
    if DECOUPLED:
        move += lr * weight_decay * p
    slices.save(m_ptr, at, m, mask)
    slices.save(v_ptr, at, v, mask)
    return p - move


@jit
def _lion(p, g, m_ptr, at, inside, mask, lr, weight_decay, fresh1, fresh2):
    m = slices.load(m_ptr, at, inside)
    ahead = slices.blend(m, g, fresh1)
    u = tl.where(ahead > 0, 1.0, tl.where(ahead < 0, -1.0, 0.0))
    slices.save(m_ptr, at, slices.blend(m, g, fresh2), mask)
    return p - lr * (u + weight_decay * p)


@jit
def _sgd(p, g, b_ptr, at, inside, mask, step_ptr, lr, weight_decay, momentum, forget, fresh, NESTEROV: tl.constexpr):
    g += weight_decay * p
    move = g
    if b_ptr is not None:
        b = slices.load(b_ptr, at, inside)
        weight = tl.where(tl.load(step_ptr) == 0, 1.0, fresh)
        # forget = 1 - momentum, which float32 represents more accurately than a momentum near 1
        b = (b - forget * b) + weight * g
        move = g + momentum * b if NESTEROV else b
        slices.save(b_ptr, at, b, mask)
    return p - lr * move


@jit
def _update(
    param_ptr, grad_ptr, first_ptr, second_ptr, out_ptr, step_ptr, lr_ptr, scale_ptr, skip_ptr, at, inside,
    weight_decay, a, b, c, d, e, RULE: tl.constexpr, MODE: tl.constexpr,
):
    p, g = slices.load(param_ptr, at, inside), slices.gradient(grad_ptr, at, inside, scale_ptr)
    lr, mask = tl.load(lr_ptr).to(tl.float32), slices.written(inside, skip_ptr)
    if RULE == "adamw":
        p = _adam(p, g, first_ptr, second_ptr, at, inside, mask, step_ptr, lr, weight_decay, a, b, c, d, e, MODE)
    elif RULE == "lion":
        p = _lion(p, g, first_ptr, at, inside, mask, lr, weight_decay, a, b)
    else:
        p = _sgd(p, g, first_ptr, at, inside, mask, step_ptr, lr, weight_decay, a, b, c, MODE)
    slices.store(param_ptr, out_ptr, at, p, mask)


@jit(do_not_specialize=["size"])
def _elementwise_kernel(
    param_ptr, grad_ptr, first_ptr, second_ptr, out_ptr, tiles_ptr, table_ptr, step_ptr, lr_ptr, scale_ptr, skip_ptr,
    size, weight_decay, a, b, c, d, e, RULE: tl.constexpr, MODE: tl.constexpr, KINDS: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):
    """Update a block; `first` and `second` are slots, a to e the numbers of a rule, KINDS the tensors of a slice."""
    line = slices.own_line(tiles_ptr, table_ptr, KINDS)
    size, start = slices.own_block(line, tiles_ptr, size, BLOCK)
    param_ptr = slices.tensor(line, 0, param_ptr, ALIGNED)
    grad_ptr = slices.tensor(line, 1, grad_ptr, ALIGNED)
    first_ptr = slices.tensor(line, 2, first_ptr, ALIGNED)
    second_ptr = slices.tensor(line, 3, second_ptr, ALIGNED)
    out_ptr = slices.tensor(line, KINDS - 1, out_ptr, ALIGNED)
    at = tl.max_contiguous(start + tl.arange(0, BLOCK), VECTOR)
    if start + BLOCK <= size:  # all blocks but the last: no mask, and vectors for any size
        _update(param_ptr, grad_ptr, first_ptr, second_ptr, out_ptr, step_ptr, lr_ptr, scale_ptr, skip_ptr, at, None,
                weight_decay, a, b, c, d, e, RULE, MODE)
    else:
        _update(param_ptr, grad_ptr, first_ptr, second_ptr, out_ptr, step_ptr, lr_ptr, scale_ptr, skip_ptr, at,
                at < size, weight_decay, a, b, c, d, e, RULE, MODE)


NUM_SLOTS, NUM_NUMBERS = 2, 6  # of the kernel; a rule with fewer leaves the last ones out


def _run(
    rule: str, columns: Columns, reference: Callable[..., None], scalars: dict[str, Tensor | None],
    options: dict[str, Any], numbers: tuple[float, ...], *, mode: bool = False,
) -> None:
    """Launch the kernel on slices, with the numbers of a rule; or call the reference, with options in their place."""
    if not columns.sizes:
        return
    like = columns.columns[0][0]
    slices.scalars(like, **scalars)
    if not columns.run_triton(rule):
        for *row, out in columns.rows():
            reference(*row, **scalars, **options, out=out)
        return
    absent = [None] * (2 + NUM_SLOTS + 1 - len(columns.columns))
    values = [*numbers, *[None] * (NUM_NUMBERS - len(numbers))]
    read = [scalars.get(name) for name in ("step", "lr", "grad_scale", "skip")]
    with on(like):
        for at in slices.launches(columns):
            *row, out = at.row
            _elementwise_kernel[at.grid](
                *row, *absent, out, at.tiles, at.table, *read, at.size, *values, RULE=rule, MODE=mode,
                KINDS=len(at.row), ALIGNED=at.aligned, **at.meta,
            )


@torch.no_grad()
def adamw(
    param: Slices, grad: Slices, exp_avg: Slices, exp_avg_sq: Slices, *, step: Tensor, lr: Tensor,
    beta1: float, beta2: float, eps: float, weight_decay: float, bias_correction: bool = True,
    decoupled: bool = True, grad_scale: Tensor | None = None, skip: Tensor | None = None, out: MaybeSlices = None,
) -> None:
    """Update flat slices of parameters and their moments in place, with one launch for all slices of the same dtypes.

    Args:
        param: (N,) contiguous, float32 or 16 bit; arithmetic is in float32. Or a list of such slices, of any lengths;
            then grad, exp_avg, exp_avg_sq and out, if not None, are lists of as many.
        grad: (N,), or any shape of N elements, of any floating dtype, multiplied by `grad_scale`.
        exp_avg: (N,) contiguous, the first moment.
        exp_avg_sq: (N,) contiguous, the second moment.
        step: () int64, updates applied before this one.
        lr: () float64 or float32.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the square root.
        weight_decay: factor of the parameter in its update, or in its gradient.
        bias_correction: False takes c1 = c2 = 1.
        decoupled: AdamW; False is Adam, with weight decay in the gradient.
        grad_scale: () float32 divisor of the gradients, or None.
        skip: () bool, or None; if true, nothing is written, whatever the gradients are.
        out: (N,) contiguous, to which the new parameters are written in its dtype, or None.

    Raises `KernelError`, naming the argument, for any other shape, dtype, device or range.
    """
    slices.numbers(eps=eps, weight_decay=weight_decay)
    slices.numbers(beta1=beta1, beta2=beta2, high=1.0)
    _run(
        "adamw",
        slices.columns({"out": out}, param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq),
        adam_reference,
        {"step": step, "lr": lr, "grad_scale": grad_scale, "skip": skip},
        {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "decoupled": decoupled,
         "bias_correction": bias_correction},
        (weight_decay, 1 - beta1, 1 - beta2, slices.log_of(beta1, corrected=bias_correction),
         slices.log_of(beta2, corrected=bias_correction), eps),
        mode=decoupled,
    )


@torch.no_grad()
def lion(
    param: Slices, grad: Slices, exp_avg: Slices, *, lr: Tensor, beta1: float, beta2: float, weight_decay: float,
    grad_scale: Tensor | None = None, skip: Tensor | None = None, out: MaybeSlices = None,
) -> None:
    """Update flat slices of parameters and their momentum in place, with one launch for all slices of the same dtypes.

    Args:
        exp_avg: (N,) contiguous, the momentum, or a list.
        beta1: weight of the momentum in the direction, in [0, 1).
        beta2: decay of the momentum, in [0, 1).
        weight_decay: factor of the parameter in its update.

    All others are as in `adamw`.

    Raises `KernelError`, naming the argument, for any other shape, dtype, device or range.
    """
    slices.numbers(weight_decay=weight_decay)
    slices.numbers(beta1=beta1, beta2=beta2, high=1.0)
    _run(
        "lion",
        slices.columns({"out": out}, param=param, grad=grad, exp_avg=exp_avg),
        lion_reference,
        {"lr": lr, "grad_scale": grad_scale, "skip": skip},
        {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay},
        (weight_decay, 1 - beta1, 1 - beta2),
    )


@torch.no_grad()
def sgd(
    param: Slices, grad: Slices, momentum_buffer: MaybeSlices = None, *, step: Tensor, lr: Tensor,
    momentum: float = 0.0, weight_decay: float = 0.0, dampening: float = 0.0, nesterov: bool = False,
    grad_scale: Tensor | None = None, skip: Tensor | None = None, out: MaybeSlices = None,
) -> None:
    """Update flat slices of parameters and any momentum in place, with one launch for all slices of the same dtypes.

    Args:
        momentum_buffer: (N,) contiguous, or a list, zeros before the first update; None: p = p - lr * g.
        step: () int64, updates applied before this one; dampening begins after the first.
        momentum: decay of the buffer.
        weight_decay: L2 penalty.
        dampening: subtracted from the weight 1 of the gradient, after the first update.
        nesterov: use Nesterov momentum.

    All others are as in `adamw`.

    Raises `KernelError`, naming the argument, for any other shape, dtype, device or range.
    """
    slices.numbers(momentum=momentum, weight_decay=weight_decay, dampening=dampening)
    _run(
        "sgd",
        slices.columns({"momentum_buffer": momentum_buffer, "out": out}, param=param, grad=grad),
        sgd_reference,
        {"step": step, "lr": lr, "grad_scale": grad_scale, "skip": skip},
        {"momentum": momentum, "weight_decay": weight_decay, "dampening": dampening, "nesterov": nesterov},
        (weight_decay, momentum, 1 - momentum, 1 - dampening),
        mode=nesterov,
    )
