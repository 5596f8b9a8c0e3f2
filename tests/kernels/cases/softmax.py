"""Launches of the masked softmax, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels.softmax import masked_softmax


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    for columns in [64, 1024, 65536]:  # several rows a program, a few, one, one in chunks
        scores = torch.empty(2, 4, 64, columns, dtype=dtype, requires_grad=True)
        padding = torch.empty(2, 1, 1, columns, dtype=dtype)
        real = torch.empty(2, 1, 64, columns, dtype=torch.bool)
        for p, mask, causal in [(0.0, None, True), (0.1, padding, False), (0.1, real, False)]:
            name = f"{columns} columns, p={p}, {'causal' if causal else mask.dtype if mask is not None else ''}"
            yield name, lambda x=scores, m=mask, c=causal, p=p: masked_softmax(x, m, causal=c, p=p, seed=1).backward(x)
    odd = torch.empty(2, 4, 64, 431, dtype=dtype, requires_grad=True)
    yield "431 columns", lambda: masked_softmax(odd, scale=0.125).backward(odd)
