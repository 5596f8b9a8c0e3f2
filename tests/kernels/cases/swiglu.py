"""Launches of the gated activation, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels._swiglu import swiglu


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    x = [torch.empty(8, 4096, dtype=dtype, requires_grad=True) for _ in range(2)]
    yield "8 x 4096", lambda: swiglu(*x).backward(x[0])
