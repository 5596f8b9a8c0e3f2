"""Launches of Adam's update, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels.optimizers.adam_update import adamw

SIZE = 2**20 + 32


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    scalars = {
        "step": torch.empty((), dtype=torch.int64),
        "lr": torch.empty((), dtype=torch.float64),
        "grad_scale": torch.empty(()),
        "skip": torch.empty((), dtype=torch.bool),
    }
    hyper = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    full, low = [torch.empty(SIZE) for _ in range(3)], [torch.empty(SIZE, dtype=dtype) for _ in range(4)]
    p, m, v = full
    bare = {name: scalars[name] for name in ("step", "lr")}
    out = low[1] if dtype != torch.float32 else None
    yield "float32 masters, gradient and copy in dtype", lambda: adamw(p, low[0], m, v, out=out, **hyper, **scalars)
    yield "Adam, no scale, no skip", lambda: adamw(p, low[0], m, v, decoupled=False, **hyper, **bare)
    yield "all in dtype", lambda: adamw(low[0], low[1], low[2], low[3], **hyper, **scalars)
    lists = [[x, x[:1000]] for x in (p, low[0], m, v)]
    odd = [[x[1:], x[1:77]] for x in (p, low[0], m, v)]
    outs = [out, out[:1000]] if out is not None else None
    yield "many slices", lambda: adamw(*lists, out=outs, **hyper, **scalars)
    yield "many slices at odd addresses", lambda: adamw(*odd, **hyper, **scalars)
    yield "many slices, all in dtype", lambda: adamw(*[[x, x] for x in low], **hyper, **scalars)
