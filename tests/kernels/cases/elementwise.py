"""Launches of the elementwise updates, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels.elementwise import adamw, lion, sgd

SIZE = 2**20 + 32
Cases = Iterator[tuple[str, Callable[[], object]]]


def cases(dtype: torch.dtype) -> Cases:
    yield from _adam(dtype)
    yield from _lion(dtype)
    yield from _sgd(dtype)


def _adam(dtype: torch.dtype) -> Cases:
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
    yield "adam, float32 masters, all else in dtype", lambda: adamw(p, low[0], m, v, out=out, **hyper, **scalars)
    yield "adam, not decoupled, no scale, no skip", lambda: adamw(p, low[0], m, v, decoupled=False, **hyper, **bare)
    yield "adam, all in dtype", lambda: adamw(low[0], low[1], low[2], low[3], **hyper, **scalars)
    lists = [[x, x[:1000]] for x in (p, low[0], m, v)]
    odd = [[x[1:], x[1:77]] for x in (p, low[0], m, v)]
    outs = [out, out[:1000]] if out is not None else None
    yield "adam, many slices", lambda: adamw(*lists, out=outs, **hyper, **scalars)
    yield "adam, many slices at odd addresses", lambda: adamw(*odd, **hyper, **scalars)
    yield "adam, many slices, all in dtype", lambda: adamw(*[[x, x] for x in low], **hyper, **scalars)


def _lion(dtype: torch.dtype) -> Cases:
    p, m, lr = torch.empty(SIZE), torch.empty(SIZE), torch.empty((), dtype=torch.float64)
    low = [torch.empty(SIZE, dtype=dtype) for _ in range(3)]
    read = {"grad_scale": torch.empty(()), "skip": torch.empty((), dtype=torch.bool)}
    hyper = {"lr": lr, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    out = low[1] if dtype != torch.float32 else None
    yield "lion, float32 masters, gradient and copy in dtype", lambda: lion(p, low[0], m, out=out, **hyper, **read)
    yield "lion, no scale, no skip", lambda: lion(p, low[0], m, **hyper)
    yield "lion, all in dtype", lambda: lion(low[0], low[1], low[2], **hyper, **read)
    outs = [out, out] if out is not None else None
    yield "lion, many slices", lambda: lion([p, p], [low[0], low[0]], [m, m], out=outs, **hyper, **read)
    yield "lion, many slices at odd addresses", lambda: lion(*[[x[1:], x[1:77]] for x in (p, low[0], m)], **hyper)
    yield "lion, many slices, all in dtype", lambda: lion(*[[x, x] for x in low], **hyper, **read)


def _sgd(dtype: torch.dtype) -> Cases:
    p, b, low = torch.empty(SIZE), torch.empty(SIZE), [torch.empty(SIZE, dtype=dtype) for _ in range(3)]
    bare = {"step": torch.empty((), dtype=torch.int64), "lr": torch.empty((), dtype=torch.float64)}
    read = {**bare, "grad_scale": torch.empty(()), "skip": torch.empty((), dtype=torch.bool)}
    past = {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}
    out = low[1] if dtype != torch.float32 else None
    yield "sgd, float32 masters, gradient and copy in dtype", lambda: sgd(p, low[0], b, out=out, **past, **read)
    yield "sgd, nesterov, no scale, no skip", lambda: sgd(p, low[0], b, momentum=0.9, nesterov=True, **bare)
    yield "sgd, no momentum", lambda: sgd(p, low[0], out=out, **read)
    yield "sgd, all in dtype", lambda: sgd(low[0], low[1], low[2], **past, **read)
    outs = [out, out] if out is not None else None
    yield "sgd, many slices", lambda: sgd([p, p], [low[0], low[0]], [b, b], out=outs, **past, **read)
    yield "sgd, many, no momentum, at odd addresses", lambda: sgd([p[1:], p[1:]], [low[0][1:], low[0][1:]], **read)
    yield "sgd, many slices, all in dtype", lambda: sgd(*[[x, x] for x in low], **past, **read)
