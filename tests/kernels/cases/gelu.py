"""Launches of GELU, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels.gelu import bias_gelu, bias_gelu_linear


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    x, bias = (torch.empty(*shape, dtype=dtype, requires_grad=True) for shape in ((64, 4096), (4096,)))
    weight = torch.empty(16, 4096, dtype=dtype, requires_grad=True)
    for approximate in ("tanh", "none"):
        for given in (None, bias):
            for recompute in (False, True):
                name = f"64 x 4096 {approximate}, {'no ' if given is None else ''}bias, {recompute=}"
                yield name, _both(bias_gelu, x, given, approximate=approximate, recompute=recompute)
        yield f"then linear, {approximate}", _both(bias_gelu_linear, x, bias, weight, approximate=approximate)
    x, bias = (torch.empty(*shape, dtype=dtype, requires_grad=True) for shape in ((431, 123), (123,)))
    yield "431 x 123", _both(bias_gelu, x, bias, recompute=True)


def _both(forward: Callable[..., torch.Tensor], *args: object, **keywords: object) -> Callable[[], object]:
    return lambda: forward(*args, **keywords).sum().backward()
