"""Launches of stochastic gradient descent, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels.optimizers.sgd_update import sgd

SIZE = 2**20 + 32


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    p, b, low = torch.empty(SIZE), torch.empty(SIZE), [torch.empty(SIZE, dtype=dtype) for _ in range(3)]
    bare = {"step": torch.empty((), dtype=torch.int64), "lr": torch.empty((), dtype=torch.float64)}
    read = {**bare, "grad_scale": torch.empty(()), "skip": torch.empty((), dtype=torch.bool)}
    past = {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}
    out = low[1] if dtype != torch.float32 else None
    yield "float32 masters, gradient and copy in dtype", lambda: sgd(p, low[0], b, out=out, **past, **read)
    yield "nesterov, no scale, no skip", lambda: sgd(p, low[0], b, momentum=0.9, nesterov=True, **bare)
    yield "no momentum", lambda: sgd(p, low[0], out=out, **read)
    yield "all in dtype", lambda: sgd(low[0], low[1], low[2], **past, **read)
    outs = [out, out] if out is not None else None
    yield "many slices", lambda: sgd([p, p], [low[0], low[0]], [b, b], out=outs, **past, **read)
    yield "many slices, no momentum, at odd addresses", lambda: sgd([p[1:], p[1:]], [low[0][1:], low[0][1:]], **read)
    yield "many slices, all in dtype", lambda: sgd(*[[x, x] for x in low], **past, **read)
