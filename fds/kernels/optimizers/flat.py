"""Flat slices: checks before the launch of an optimizer's kernel, and device functions that the kernels share.

An update writes 1-D tensors of one length in place. Values that change between updates are 0-d tensors on their
device, which the kernel reads: nothing waits for the device, and a CUDA graph of the launch remains valid.
"""

from __future__ import annotations

import math
from math import inf

import torch
from torch import Tensor

from fds.errors import KernelError, is_number
from fds.kernels import arguments
from fds.kernels.language import jit, tl

# Elements per program, elements per thread and access, and warps, by bytes per element of param. With eight elements
# per thread up to 128 bytes are in flight (param, gradient, two moments), so that two programs cover a multiprocessor's
# share of latency times bandwidth (some 25 KB), and registers allow seven or more. VECTOR bounds the vectors of
# narrower tensors to as many elements, so that all accesses have one layout. Without it, Adam with 16-bit gradients
# takes 92 registers on sm_90 instead of 72, and values are exchanged through shared memory. Derived from that, not
# measured.
LAUNCH = {4: {"BLOCK": 1024, "VECTOR": 4, "num_warps": 4}, 2: {"BLOCK": 2048, "VECTOR": 8, "num_warps": 8}}

_SCALARS = {
    "step": (torch.int64,), "lr": (torch.float64, torch.float32), "grad_scale": (torch.float32, torch.float64),
    "skip": (torch.bool,),
}


def slices(
    param: Tensor, *, read: dict[str, Tensor], written: dict[str, Tensor | None], place: str = ""
) -> None:
    """Raise `KernelError` unless all are floating-point (N,) on one device, and those that are written contiguous.

    `place` is appended to names in errors: the index of the slice among many, as "[3]".
    """
    named = {f"{name}{place}": x for name, x in {"param": param, **read, **written}.items()}
    arguments.floating(**named)
    if param.dim() != 1:
        raise KernelError(f"param{place} is not flat", where=f"param{place}", got=str(tuple(param.shape)), want="(N,)",
                          hint="param.view(-1)")
    arguments.shape((param.numel(),), **named)
    for name, x in named.items():
        if name.removesuffix(place) in read:
            continue
        if x is not None and not x.is_contiguous():
            raise KernelError(f"{name} is written in place, and not contiguous", where=name,
                              got=f"stride {x.stride()}", want="stride (1,)")


def scalars(param: Tensor, **named: Tensor | None) -> None:
    """Raise `KernelError` unless step, lr, grad_scale and skip are 0-d tensors of their dtypes, on `param`'s device."""
    for name, x in named.items():
        if x is None and name in ("grad_scale", "skip"):
            continue
        if not isinstance(x, Tensor) or x.dim() != 0 or x.dtype not in _SCALARS[name] or x.device != param.device:
            got = f"{tuple(x.shape)} {x.dtype} on {x.device}" if isinstance(x, Tensor) else repr(x)
            raise KernelError(
                f"{name} is not a 0-d tensor of its dtype on the device", where=name, got=got,
                want=f"a () {' or '.join(map(str, _SCALARS[name]))} tensor on {param.device}",
            )


def numbers(*, low: float = 0.0, high: float = inf, **named: float) -> None:
    """Raise `KernelError` unless all are Python numbers in [low, high)."""
    for name, x in named.items():
        if not is_number(x) or not low <= x < high:
            raise KernelError(f"{name} is out of range", where=name, got=repr(x),
                              want=f"a Python number in [{low:g}, {high:g})")


def wide(*tensors: Tensor) -> list[Tensor]:
    """Return tensors in the dtype in which a reference computes: float64 if the first is, else float32."""
    return [x.to(arguments.width(tensors[0])) for x in tensors]


def write(old: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """Write `new` over `old`, unless skipped."""
    old.copy_(new if skip is None else torch.where(skip, old, new.to(old.dtype)))


def log_of(beta: float, *, corrected: bool = True) -> float:
    """Return log(beta) for `correction`, or -inf, for which the correction is 1, unless `corrected`."""
    return math.log(beta) if corrected and beta > 0 else -inf


@jit
def correction(updates, log_beta):
    """Return 1 - beta^updates in float32, within some 2 units in the last place; `updates` is at least 1."""
    y = -updates.to(tl.float32) * log_beta
    near = tl.minimum(y, 1.0)  # below 1, 1 - exp(-y) would cancel: its series up to y^11
    series = near * 0 + 1
    for k in tl.static_range(11, 1, -1):  # pyright: ignore[reportGeneralTypeIssues]
        series = 1 - near * series * (1.0 / k)
    return tl.where(y < 1, near * series, 1 - tl.exp(-y))


@jit
def blend(old, new, fresh):
    """Return old + fresh * (new - old), accurately for `fresh` near 0 and near 1.

    `fresh` is 1 - beta, which float32 represents more accurately than a beta near 1.
    """
    return (old - fresh * old) + fresh * new


@jit
def gradient(grad_ptr, at, inside, scale_ptr):
    """Return gradients in float32, divided by their scale."""
    g = tl.load(grad_ptr + at, mask=inside).to(tl.float32)
    if scale_ptr is not None:
        g = g / tl.load(scale_ptr).to(tl.float32)
    return g


@jit
def written(inside, skip_ptr):
    """Return the mask of a store: `inside`, or nothing if the update is skipped.

    The scalar condition goes through `tl.where`: the interpreter broadcasts it in the dtype that was compared, which
    Triton 3.9 does not accept as a mask.
    """
    if skip_ptr is None:
        mask = inside
    elif inside is None:
        mask = tl.where(tl.load(skip_ptr) == 0, True, False)
    else:
        mask = tl.where(tl.load(skip_ptr) == 0, inside, False)
    return mask


@jit
def store(param_ptr, out_ptr, at, p, mask):
    """Store new parameters, and their low-precision copy if there is one."""
    p = p.to(param_ptr.dtype.element_ty)
    tl.store(param_ptr + at, p, mask=mask)
    if out_ptr is not None:
        tl.store(out_ptr + at, p.to(out_ptr.dtype.element_ty), mask=mask)
