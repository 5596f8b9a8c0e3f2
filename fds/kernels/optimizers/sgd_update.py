"""Stochastic gradient descent over a flat slice, plain or with momentum, in place, in one pass.

    g = grad / grad_scale + weight_decay * p
    b = momentum * b + (1 - dampening) * g             b = momentum * b + g at step 0
    p = p - lr * b                                     nesterov: p - lr * (g + momentum * b); no buffer: p - lr * g

All (N,).

Moves: 20 bytes per element in float32 with 16-bit gradient and copy: reads p, g, b, writes p, b, out; 12 without b.
Source: Polyak 1964; Sutskever et al. 2013, ICML, section 2; the form is torch.optim.SGD's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fds.kernels.language import jit, on, tl
from fds.kernels.optimizers import _multi_tensor, flat
from fds.kernels.optimizers._multi_tensor import MaybeSlices, Slices


def reference(
    param: Tensor, grad: Tensor, momentum_buffer: Tensor | None = None, *, step: Tensor, lr: Tensor,
    momentum: float = 0.0, weight_decay: float = 0.0, dampening: float = 0.0, nesterov: bool = False,
    grad_scale: Tensor | None = None, skip: Tensor | None = None, out: Tensor | None = None,
) -> None:
    """Do the same in plain torch."""
    p, g = flat.wide(param, grad)
    if grad_scale is not None:
        g = g / grad_scale
    g = g + weight_decay * p
    move = g
    if momentum_buffer is not None:
        b = momentum_buffer.to(p.dtype)
        b = momentum * b + (1 - dampening * (step != 0).to(p.dtype)) * g
        move = g + momentum * b if nesterov else b
        flat.write(momentum_buffer, b, skip)
    flat.write(param, p - lr * move, skip)
    if out is not None:
        flat.write(out, param, skip)


@jit
def _update(
    param_ptr, grad_ptr, b_ptr, out_ptr, step_ptr, lr_ptr, scale_ptr, skip_ptr, at, inside,
    momentum, forget, fresh, weight_decay, NESTEROV: tl.constexpr,
):
    p = tl.load(param_ptr + at, mask=inside).to(tl.float32)
    if b_ptr is not None:
        b = tl.load(b_ptr + at, mask=inside).to(tl.float32)
    g = flat.gradient(grad_ptr, at, inside, scale_ptr)
    lr = tl.load(lr_ptr).to(tl.float32)
    g += weight_decay * p
    mask = flat.written(inside, skip_ptr)
    move = g
    if b_ptr is not None:
        weight = tl.where(tl.load(step_ptr) == 0, 1.0, fresh)
        # forget = 1 - momentum, which float32 represents more accurately than a momentum near 1
        b = (b - forget * b) + weight * g
        move = g + momentum * b if NESTEROV else b
        tl.store(b_ptr + at, b.to(b_ptr.dtype.element_ty), mask=mask)
    flat.store(param_ptr, out_ptr, at, p - lr * move, mask)


@jit(do_not_specialize=["size"])
def _sgd_kernel(
    param_ptr, grad_ptr, b_ptr, out_ptr, tiles_ptr, table_ptr, step_ptr, lr_ptr, scale_ptr, skip_ptr, size,
    momentum, forget, fresh, weight_decay,
    NESTEROV: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):
    line = _multi_tensor.own_line(tiles_ptr, table_ptr, 4)
    size, first = _multi_tensor.own_block(line, tiles_ptr, size, BLOCK)
    param_ptr = _multi_tensor.tensor(line, 0, param_ptr, ALIGNED)
    grad_ptr = _multi_tensor.tensor(line, 1, grad_ptr, ALIGNED)
    b_ptr = _multi_tensor.tensor(line, 2, b_ptr, ALIGNED)
    out_ptr = _multi_tensor.tensor(line, 3, out_ptr, ALIGNED)
    at = tl.max_contiguous(first + tl.arange(0, BLOCK), VECTOR)
    if first + BLOCK <= size:  # all blocks but the last: no mask, and vectors for any size
        _update(param_ptr, grad_ptr, b_ptr, out_ptr, step_ptr, lr_ptr, scale_ptr, skip_ptr, at, None,
                momentum, forget, fresh, weight_decay, NESTEROV)
    else:
        _update(param_ptr, grad_ptr, b_ptr, out_ptr, step_ptr, lr_ptr, scale_ptr, skip_ptr, at, at < size,
                momentum, forget, fresh, weight_decay, NESTEROV)


@torch.no_grad()
def sgd(
    param: Slices, grad: Slices, momentum_buffer: MaybeSlices = None, *, step: Tensor, lr: Tensor,
    momentum: float = 0.0, weight_decay: float = 0.0, dampening: float = 0.0, nesterov: bool = False,
    grad_scale: Tensor | None = None, skip: Tensor | None = None, out: MaybeSlices = None,
) -> None:
    """Update flat slices of parameters and any momentum in place, with one launch for all slices of the same dtypes.

    Args:
        param: (N,) contiguous, float32 or 16 bit; arithmetic is in float32. Or a list of such slices, of any lengths;
            then grad, and momentum_buffer and out, if not None, are lists of as many.
        grad: (N,), or any shape of N elements, of any floating dtype, multiplied by `grad_scale`.
        momentum_buffer: (N,) contiguous, zeros before the first update; None: p = p - lr * g.
        step: () int64, updates applied before this one; dampening begins after the first.
        lr: () float64 or float32.
        momentum: decay of the buffer.
        weight_decay: L2 penalty.
        dampening: subtracted from the weight 1 of the gradient, after the first update.
        nesterov: use Nesterov momentum.
        grad_scale: () float32 divisor of the gradients, or None.
        skip: () bool, or None; if true, nothing is written, whatever the gradients are.
        out: (N,) contiguous, to which the new parameters are written in its dtype, or None.

    Raises `KernelError`, naming the argument, for any other shape, dtype, device or range.
    """
    flat.numbers(momentum=momentum, weight_decay=weight_decay, dampening=dampening)
    found = _multi_tensor.columns({"momentum_buffer": momentum_buffer, "out": out}, param=param, grad=grad)
    if not found.sizes:
        return
    flat.scalars(found.columns[0][0], step=step, lr=lr, grad_scale=grad_scale, skip=skip)
    if not found.run_triton("sgd"):
        for *slices, low in found.rows():
            reference(
                *slices, step=step, lr=lr, momentum=momentum, weight_decay=weight_decay, dampening=dampening,
                nesterov=nesterov, grad_scale=grad_scale, skip=skip, out=low,
            )
        return
    with on(found.columns[0][0]):
        for at in _multi_tensor.launches(found):
            _sgd_kernel[at.grid](
                *at.row, at.tiles, at.table, step, lr, grad_scale, skip, at.size,
                momentum, 1 - momentum, 1 - dampening, weight_decay, NESTEROV=nesterov, ALIGNED=at.aligned, **at.meta,
            )
