"""SwiGLU: the gated activation of a feed-forward layer, in one pass.

    y = silu(gate) * up        silu(z) = z * sigmoid(z)        gate, up, y (..., N)

With s = sigmoid(gate) and dy the gradient of y::

    dgate = dy * up * s * (1 + gate * (1 - s))        dup = dy * gate * s

Moves: forward reads 2 and writes 1 tensor; backward reads 3 and writes 2. Saves: its inputs gate and up.
Source: Shazeer 2020, arXiv:2002.05202, equation 6.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.kernels import arguments, tiles
from fds.kernels.choice import runs_triton
from fds.kernels.language import cdiv, jit, on, tl
from fds.kernels.operators import Function, first_order, operator


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """Return the same in plain torch."""
    return F.silu(gate) * up


# By bytes per element: each thread has two loads of 16 bytes per tensor in flight.
LAUNCH = {2: {"BLOCK": 2048, "num_warps": 4}, 4: {"BLOCK": 1024, "num_warps": 4}}


@jit
def _sigmoid(z):
    e = tl.exp(-tl.abs(z))
    return tl.where(z >= 0, 1.0, e) / (1 + e)


@jit
def _forward_kernel(gate_ptr, up_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gate = tl.load(gate_ptr + at, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside).to(tl.float32)
    tl.store(y_ptr + at, (gate * _sigmoid(gate) * up).to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    dy = tl.load(dy_ptr + at, mask=inside).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside).to(tl.float32)
    s = _sigmoid(gate)
    tl.store(dgate_ptr + at, (dy * up * s * (1 + gate * _sigmoid(-gate))).to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + at, (dy * gate * s).to(dup_ptr.dtype.element_ty), mask=inside)


@operator("swiglu", lambda gate, up: tiles.like(gate))
def _forward(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    meta = LAUNCH[y.element_size()]
    with on(y):
        _forward_kernel[(cdiv(y.numel(), meta["BLOCK"]),)](gate, up, y, y.numel(), **meta)
    return y


@operator("swiglu_backward", lambda dy, gate, up: (tiles.like(gate), tiles.like(gate)))
def _backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dy, gate, up = dy.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    meta = LAUNCH[dy.element_size()]
    with on(dy):
        _backward_kernel[(cdiv(dy.numel(), meta["BLOCK"]),)](dy, gate, up, dgate, dup, dy.numel(), **meta)
    return dgate, dup


class _Swiglu(Function):
    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return _forward(gate, up)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        return first_order(_backward, dy, *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up.

    Args:
        gate: (..., N) float32, float16 or bfloat16 (float64 by the reference).
        up: as gate.

    Raises `KernelError` for another dtype, and where the two differ in shape, dtype or device.
    """
    arguments.floating(gate=gate, up=up)
    arguments.alike(gate=gate, up=up)
    return _Swiglu.apply(gate, up) if runs_triton("swiglu", gate) else reference(gate, up)
