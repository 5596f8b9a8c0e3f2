"""Triton, or what stands in where it is not installed, and what a launch asks about the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # not on Linux: references run, and requesting a kernel raises an error (fds.kernels.choice)
    triton: Any = None
    tl: Any = None
    TensorDescriptor: Any = None

__all__ = [
    "TensorDescriptor", "cdiv", "current_stream", "fitting", "is_capturing", "is_interpreted", "is_there", "jit",
    "next_power_of_2", "num_processors", "on", "rehearsing_capture", "shared_memory", "tl", "to_device", "triton",
]

is_there = triton is not None
# Whether kernels run in Triton's interpreter, on CPU tensors; decided where they are defined, when this is imported.
is_interpreted = is_there and bool(triton.knobs.runtime.interpret)


def jit(kernel: Any = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """Compile a function with Triton on its first launch, or interpret it with TRITON_INTERPRET=1.

    Triton recompiles for integer arguments that are 1 or multiples of 16, except those in `do_not_specialize`.
    """
    if kernel is None:
        return functools.partial(jit, do_not_specialize=do_not_specialize)
    if not is_there:
        return kernel
    if triton.knobs.runtime.interpret:
        return triton.jit(kernel)
    from fds.kernels.launch import Kernel

    return Kernel(kernel, do_not_specialize=list(do_not_specialize))


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n, and 1 for n below 1."""
    return 1 << max(n - 1, 0).bit_length()


def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; 2 for the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def current_stream(device: torch.device) -> int:
    """Return the handle of the current stream: a table that was copied on one stream may only be used on it."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def is_capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured: its replays would copy tables from memory that was freed since."""
    return device.type == "cuda" and (_rehearsed > 0 or torch.cuda.is_current_stream_capturing())


@contextlib.contextmanager
def rehearsing_capture() -> Iterator[None]:
    """Launch as in a capture, in all threads: what a capture launches is compiled then, and loaded."""
    global _rehearsed
    _rehearsed += 1
    try:
        yield
    finally:
        _rehearsed -= 1


_rehearsed = 0  # scopes that are open


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """Copy a table from the host to a device asynchronously, on the current stream.

    Torch does not reuse the pinned memory before the copy is done.
    """
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def on(x: Tensor) -> contextlib.AbstractContextManager:
    """Make the device of a tensor the current one, on which Triton launches, where it is not."""
    is_elsewhere = x.is_cuda and x.get_device() != torch.cuda.current_device()
    return torch.cuda.device(x.device) if is_elsewhere else _HERE


_HERE = contextlib.nullcontext()


# Rows of launch tables go by the KiB of shared memory that a block may use, of which few GPUs have as much as Hopper:
# 163 of compute capability 8.0 and 8.7, 99 of 8.6, 8.9 and 12.0, 227 of 9.0 and 10.0. Source: CUDA C++ Programming
# Guide, table "Technical specifications per compute capability", the most shared memory per thread block.
LEAST = 99  # of the GPUs that can run bfloat16, from compute capability 8.0 on; every table has a row for it
MOST = 227

Row = TypeVar("Row")


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return how many KiB of shared memory a block may use on a device; on the CPU, to be interpreted, as on Hopper."""
    if device.type != "cuda":
        return MOST
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin // 1024


def fitting(rows: Mapping[int, Row], device: torch.device) -> Row:
    """Return the row for the most KiB that the device has; on a device with less than all ask for, that for the least.

    There is no smaller row to fall back to, so Triton refuses such a launch there by the bytes that it needs.
    """
    if len(rows) == 1:
        return next(iter(rows.values()))
    most = shared_memory(device)
    return rows[max((kib for kib in rows if kib <= most), default=min(rows))]
