"""Launches of sums of messages, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from fds.kernels.sums import sum_messages


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    for bits, group, n in ((8, 256, 2**16), (4, 256, 2**16), (1, 2048, 2**16), (4, 8192, 2**16), (8, 40, 1001)):
        messages = torch.empty(4, -(-n // group) * (4 + group * bits // 8), dtype=torch.uint8)
        out, own = torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype)
        name = f"4 x {n} in {bits} bits by {group}"
        yield name, partial(sum_messages, messages, out, bits=bits, group=group)
        yield f"{name}, own", partial(sum_messages, messages, out, bits=bits, group=group, own=own, index=2)
