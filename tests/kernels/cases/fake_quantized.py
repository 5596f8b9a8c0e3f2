"""Launches of fake quantization, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels import fake_quantize


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    for groups, numbers in ((1024, 1024), (32768, 32), (128, 8192), (4, 2**18), (431, 123)):
        x = torch.empty(groups, numbers, dtype=dtype, requires_grad=True)
        for scheme in ("deepspeed", "torchao"):
            for symmetric in (True, False):
                name = f"{groups} x {numbers} {scheme}{'' if symmetric else ', shifted'}"
                yield name, lambda x=x, given=(scheme, symmetric): _both(x, *given)
    x, noise = torch.empty(64, 1024, dtype=dtype), torch.empty(64, 1024)
    yield "64 x 1024 with noise", lambda: fake_quantize(x, 8, noise=noise)
    level = torch.tensor(4)
    yield "64 x 1024 of bits in time", lambda: fake_quantize(x, level, reach=(4, 8))


def _both(x: torch.Tensor, scheme: str, symmetric: bool) -> None:
    fake_quantize(x, 4, scheme=scheme, symmetric=symmetric).sum().backward()
