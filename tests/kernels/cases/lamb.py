"""Launches of LAMB's passes, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels._lamb import lamb

SEGMENTS = [(0, 2**20), (2**20, 1000), (2**20 + 1024, 0)]
SIZE = 2**20 + 1024


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    p, m, v = (torch.empty(SIZE) for _ in range(3))
    low = [torch.empty(SIZE, dtype=dtype) for _ in range(4)]
    now = {
        "step": torch.empty((), dtype=torch.int64),
        "lr": torch.empty((), dtype=torch.float64),
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-6,
        "weight_decay": 0.1,
        "min_coeff": 0.01,
        "max_coeff": 10.0,
    }
    bare = {**now, "segments": SEGMENTS}
    device = {"grad_scale": torch.empty(()), "skip": torch.empty((), dtype=torch.bool)}
    read = {**bare, **device}
    out = low[1] if dtype != torch.float32 else None
    yield "float32 masters, gradient and copy in dtype", lambda: lamb(p, low[0], m, v, out=out, **read)
    yield "eps inside, no scale, no skip", lambda: lamb(p, low[0], m, v, eps_inside_sqrt=True, **bare)
    yield "all in dtype", lambda: lamb(low[0], low[1], low[2], low[3], **read)
    small = lambda *xs: [[x[:1000] for _ in range(2)] for x in xs]
    of_all = {**now, **device, "segments": [[(0, 1000)]] * 2}
    copies = None if out is None else small(out)[0]
    yield "many, copies in dtype", lambda: lamb(*small(p, low[0], m, v), out=copies, **of_all)
    odd = lambda *xs: [[x[1:1001] for _ in range(2)] for x in xs]
    yield "many at odd addresses", lambda: lamb(*odd(p, low[0], m, v), **of_all)
