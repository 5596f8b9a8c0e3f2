"""How near a kernel must come to its reference in float64, and on what."""

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
AWKWARD = [1, 6, 42, 123, 431, 8191]

# Of ||out - ref|| / ||ref||: the rounding of what is read and written, and float32 arithmetic between.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


def distance(out: Tensor, ref: Tensor) -> float:
    """Return ||out - ref|| / ||ref||, NaN where either has one."""
    out, ref = out.detach().double(), ref.detach().double()
    return float((out - ref).norm() / ref.norm().clamp(min=1e-300))


def assert_near(out: Tensor, ref: Tensor, dtype: torch.dtype | None = None, *, factor: float = 1.0) -> None:
    """Check shape and distance; `factor` says how many roundings of its dtype a result is made of."""
    assert out.shape == ref.shape
    got, most = distance(out, ref), factor * TOLERANCE[dtype or out.dtype]
    assert got <= most, f"{got:.3g} > {most:.3g} for {dtype or out.dtype}"


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, requires_grad: bool = False) -> Tensor:
    """Return random numbers that `dtype` can hold."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.requires_grad_(requires_grad)


def in_float64(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return copies in float64 that ask for gradients as the originals do."""
    return [None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in tensors]


def strided(x: Tensor) -> Tensor:
    """Return equal numbers in memory with gaps, last dimension first."""
    wide = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2]
    wide.copy_(x)
    return wide.transpose(-1, 0).contiguous().transpose(-1, 0) if x.dim() > 1 else wide
