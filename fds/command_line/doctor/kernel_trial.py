"""Run a small kernel of Triton's and its reference on a kind of device, and print by how much they differ, as JSON."""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from fds.kernels import only, rms_norm

ROWS, COLUMNS = 33, 130  # no multiples of a block


def trial(device: str) -> dict[str, float]:
    """Return the greatest difference of outputs and gradients, and the rounding of sums of so many terms."""
    generator = torch.Generator().manual_seed(0)
    x, weight, upstream = (
        torch.randn(shape, generator=generator).to(device) for shape in ((ROWS, COLUMNS), (COLUMNS,), (ROWS, COLUMNS))
    )
    found = []
    for kind in ("triton", "reference"):
        with only(kind):
            found.append(_results(x, weight, upstream))
    error = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
    largest = max(float(b.abs().max()) for b in found[1])
    return {"max_error": error, "bound": COLUMNS * torch.finfo(torch.float32).eps * largest}


def _results(x: Tensor, weight: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = rms_norm(x, weight)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), upstream))


if __name__ == "__main__":
    print(json.dumps(trial(sys.argv[1])))
