"""Launches of LAMB's passes, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels.optimizers.lamb_update import lamb

SEGMENTS = [(0, 2**20), (2**20, 1000), (2**20 + 1024, 0)]
SIZE = 2**20 + 1024


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    p, m, v = (torch.empty(SIZE) for _ in range(3))
    low = [torch.empty(SIZE, dtype=dtype) for _ in range(4)]
    bare = {
        "segments": SEGMENTS,
        "step": torch.empty((), dtype=torch.int64),
        "lr": torch.empty((), dtype=torch.float64),
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-6,
        "weight_decay": 0.1,
        "min_coeff": 0.01,
        "max_coeff": 10.0,
    }
    read = {**bare, "grad_scale": torch.empty(()), "skip": torch.empty((), dtype=torch.bool)}
    out = low[1] if dtype != torch.float32 else None
    yield "float32 masters, gradient and copy in dtype", lambda: lamb(p, low[0], m, v, out=out, **read)
    yield "eps inside, no scale, no skip", lambda: lamb(p, low[0], m, v, eps_inside_sqrt=True, **bare)
    yield "all in dtype", lambda: lamb(low[0], low[1], low[2], low[3], **read)
