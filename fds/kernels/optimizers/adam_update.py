"""Adam and AdamW over a flat slice, in place, in one pass.

    g = grad / grad_scale                        (Adam: g = g + weight_decay * p)
    m = m + (1 - beta1) * (g - m)                v = v + (1 - beta2) * (g^2 - v)
    p = p - lr * (weight_decay * p + (m / c1) / (sqrt(v / c2) + eps))            (Adam: without weight_decay * p)

All (N,); c1 = 1 - beta1^n, c2 = 1 - beta2^n, n = step + 1; 0 / 0 is 0, so that padding stays zero.

Moves: 28 bytes per element in float32 with 16-bit gradient and copy: reads p, g, m, v, writes p, m, v, out.
Source: [1] Kingma and Ba 2015, arXiv:1412.6980, algorithm 1. [2] Loshchilov and Hutter 2019, arXiv:1711.05101,
algorithm 2 (with lr in place of its two factors).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fds.kernels.language import jit, on, tl
from fds.kernels.optimizers import _multi_tensor, flat
from fds.kernels.optimizers._multi_tensor import MaybeSlices, Slices


def reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, step: Tensor, lr: Tensor,
    beta1: float, beta2: float, eps: float, weight_decay: float, bias_correction: bool = True,
    decoupled: bool = True, grad_scale: Tensor | None = None, skip: Tensor | None = None, out: Tensor | None = None,
) -> None:
    """Do the same in plain torch."""
    p, g, m, v = flat.wide(param, grad, exp_avg, exp_avg_sq)
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
        flat.write(old, new, skip)
    if out is not None:
        flat.write(out, param, skip)


@jit
def _update(
    param_ptr, grad_ptr, m_ptr, v_ptr, out_ptr, step_ptr, lr_ptr, scale_ptr, skip_ptr, at, inside,
    fresh1, fresh2, log_beta1, log_beta2, eps, weight_decay, DECOUPLED: tl.constexpr,
):
    p = tl.load(param_ptr + at, mask=inside).to(tl.float32)
    m = tl.load(m_ptr + at, mask=inside).to(tl.float32)
    v = tl.load(v_ptr + at, mask=inside).to(tl.float32)
    g = flat.gradient(grad_ptr, at, inside, scale_ptr)
    n = tl.load(step_ptr) + 1
    lr = tl.load(lr_ptr).to(tl.float32)
    rate = lr / flat.correction(n, log_beta1)
    root = 1 / tl.sqrt(flat.correction(n, log_beta2))
    if not DECOUPLED:
        g += weight_decay * p
    m = flat.blend(m, g, fresh1)
    v = flat.blend(v, g * g, fresh2)
    move = rate * m / tl.where(m == 0, 1, tl.sqrt(v) * root + eps)
    if DECOUPLED:
        move += lr * weight_decay * p
    mask = flat.written(inside, skip_ptr)
    tl.store(m_ptr + at, m.to(m_ptr.dtype.element_ty), mask=mask)
    tl.store(v_ptr + at, v.to(v_ptr.dtype.element_ty), mask=mask)
    flat.store(param_ptr, out_ptr, at, p - move, mask)


@jit(do_not_specialize=["size"])
def _adam_kernel(
    param_ptr, grad_ptr, m_ptr, v_ptr, out_ptr, tiles_ptr, table_ptr, step_ptr, lr_ptr, scale_ptr, skip_ptr, size,
    fresh1, fresh2, log_beta1, log_beta2, eps, weight_decay,
    DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):
    line = _multi_tensor.own_line(tiles_ptr, table_ptr, 5)
    size, first = _multi_tensor.own_block(line, tiles_ptr, size, BLOCK)
    param_ptr = _multi_tensor.tensor(line, 0, param_ptr, ALIGNED)
    grad_ptr = _multi_tensor.tensor(line, 1, grad_ptr, ALIGNED)
    m_ptr = _multi_tensor.tensor(line, 2, m_ptr, ALIGNED)
    v_ptr = _multi_tensor.tensor(line, 3, v_ptr, ALIGNED)
    out_ptr = _multi_tensor.tensor(line, 4, out_ptr, ALIGNED)
    at = tl.max_contiguous(first + tl.arange(0, BLOCK), VECTOR)
    if first + BLOCK <= size:  # all blocks but the last: no mask, and vectors for any size
        _update(param_ptr, grad_ptr, m_ptr, v_ptr, out_ptr, step_ptr, lr_ptr, scale_ptr, skip_ptr, at, None,
                fresh1, fresh2, log_beta1, log_beta2, eps, weight_decay, DECOUPLED)
    else:
        _update(param_ptr, grad_ptr, m_ptr, v_ptr, out_ptr, step_ptr, lr_ptr, scale_ptr, skip_ptr, at, at < size,
                fresh1, fresh2, log_beta1, log_beta2, eps, weight_decay, DECOUPLED)


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
    flat.numbers(eps=eps, weight_decay=weight_decay)
    flat.numbers(beta1=beta1, beta2=beta2, high=1.0)
    found = _multi_tensor.columns({"out": out}, param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    if not found.sizes:
        return
    flat.scalars(found.columns[0][0], step=step, lr=lr, grad_scale=grad_scale, skip=skip)
    if not found.run_triton("adamw"):
        for *slices, low in found.rows():
            reference(
                *slices, step=step, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
                bias_correction=bias_correction, decoupled=decoupled, grad_scale=grad_scale, skip=skip, out=low,
            )
        return
    with on(found.columns[0][0]):
        for at in _multi_tensor.launches(found):
            _adam_kernel[at.grid](
                *at.row, at.tiles, at.table, step, lr, grad_scale, skip, at.size,
                1 - beta1, 1 - beta2, flat.log_of(beta1, corrected=bias_correction),
                flat.log_of(beta2, corrected=bias_correction), eps, weight_decay,
                DECOUPLED=decoupled, ALIGNED=at.aligned, **at.meta,
            )
