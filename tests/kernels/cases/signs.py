"""Launches of messages of signs, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from fds.kernels.signs import pack_signs


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    for group, n in ((2048, 2**16), (8192, 2**16), (96, 1001)):
        x, kept = torch.empty(3, n, dtype=dtype), torch.empty(3, n)
        messages = torch.empty(3, -(-n // group) * (4 + group // 8), dtype=torch.uint8)
        for lost in (None, kept):
            name = f"3 x {n} by {group}" + ", kept" * (lost is not None)
            yield name, partial(pack_signs, x, messages, group=group, kept=lost)
