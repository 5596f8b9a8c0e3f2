"""Launches of Lion's update, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels.optimizers.lion_update import lion

SIZE = 2**20 + 32


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    p, m, lr = torch.empty(SIZE), torch.empty(SIZE), torch.empty((), dtype=torch.float64)
    low = [torch.empty(SIZE, dtype=dtype) for _ in range(3)]
    read = {"grad_scale": torch.empty(()), "skip": torch.empty((), dtype=torch.bool)}
    hyper = {"lr": lr, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    out = low[1] if dtype != torch.float32 else None
    yield "float32 masters, gradient and copy in dtype", lambda: lion(p, low[0], m, out=out, **hyper, **read)
    yield "no scale, no skip", lambda: lion(p, low[0], m, **hyper)
    yield "all in dtype", lambda: lion(low[0], low[1], low[2], **hyper, **read)
    outs = [out, out] if out is not None else None
    yield "many slices", lambda: lion([p, p], [low[0], low[0]], [m, m], out=outs, **hyper, **read)
    yield "many slices at odd addresses", lambda: lion(*[[x[1:], x[1:77]] for x in (p, low[0], m)], **hyper)
    yield "many slices, all in dtype", lambda: lion(*[[x, x] for x in low], **hyper, **read)
