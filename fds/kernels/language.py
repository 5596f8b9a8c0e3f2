"""Triton as the kernels see it, and what a launch must know about the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # not on Linux: references run, and a kernel that is asked for is refused (fds.kernels.choice)
    triton: Any = None
    tl: Any = None

__all__ = [
    "cdiv", "current_stream", "is_capturing", "is_interpreted", "is_there", "jit", "next_power_of_2", "num_processors",
    "on", "tl", "to_device", "triton",
]  # fmt: skip

is_there = triton is not None
# Kernels run in Triton's interpreter, which takes CPU tensors; settled where they are defined, when fds is imported.
is_interpreted = is_there and bool(triton.knobs.runtime.interpret)


def jit(kernel: Any = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """Compile a function with Triton when it is first launched; interpret it where TRITON_INTERPRET=1.

    Triton compiles anew for integers that are 1 or multiples of 16, except in arguments that are not specialized.
    """
    if kernel is None:
        return functools.partial(jit, do_not_specialize=do_not_specialize)
    return triton.jit(kernel, do_not_specialize=list(do_not_specialize)) if is_there else kernel


def cdiv(a: int, b: int) -> int:
    """Return the number of pieces of b that cover a."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n, itself at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def num_processors(device: torch.device) -> int:
    """Return how many programs a device runs at the same time: its multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def current_stream(device: torch.device) -> int:
    """Return what tells the streams of a device apart: tables that are copied in the order of one are for it alone."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def is_capturing(device: torch.device) -> bool:
    """Say whether launches are recorded in a CUDA graph: it would copy tables from memory that is no longer theirs."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """Return a table of the host's on a device, in the order of its stream, without waiting.

    Torch lends the pinned memory to nobody else before the copy from it is done.
    """
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def on(x: Tensor) -> contextlib.AbstractContextManager:
    """Make the device of a tensor current: Triton launches on that one."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
