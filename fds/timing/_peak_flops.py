"""`peak_flops`: how many floating-point operations a second a device does in products of matrices."""

from __future__ import annotations

import time
from typing import Any

import torch

from fds.errors import FdsError, is_a

_RUNS = 5
_SIZES = {"cuda": 8192}  # rows and columns; elsewhere _SMALL
_SMALL = 1024


def peak_flops(dtype: torch.dtype = torch.float32, *, device: Any = "cpu") -> float:
    """Measure the floating-point operations a second of one device, in products of square matrices: the best of five.

    On a CPU by as many threads as torch has now, in 0.1 s or so; 16-bit products may take ten times as long. A GPU is
    waited for. What it has no products for, such as integers, is refused.

        timed = fds.timed(flops=flops, peak_flops=num_ranks * fds.timing.peak_flops(torch.bfloat16, device="cuda"))

    Raises `FdsError` for what is not a floating-point dtype and not a device that is there.
    """
    if not is_a(dtype, torch.dtype) or not dtype.is_floating_point:
        raise FdsError("not a dtype of a step", where="dtype", got=repr(dtype)[:80], want="torch.bfloat16, or another")
    try:
        where = torch.device(device)
        n = _SIZES.get(where.type, _SMALL)
        x = torch.full((n, n), 1 / n, dtype=dtype, device=where)
        best = min(_seconds(x) for _ in range(1 + _RUNS))
    except (RuntimeError, TypeError, AssertionError) as error:
        raise FdsError(
            "there are no products of matrices of this dtype on this device",
            where=f"peak_flops, {device!r}"[:80],
            got=str(error)[:200],
            want='torch.float32 on "cpu", or another',
        ) from error
    return 2 * n**3 / best


def _seconds(x: torch.Tensor) -> float:
    _wait(x.device)
    start = time.perf_counter()
    torch.mm(x, x)
    _wait(x.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
