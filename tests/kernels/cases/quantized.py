"""Launches of messages of integers, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels.quantized import quantize


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    for bits, group, n in ((8, 256, 2**16), (4, 256, 2**16), (8, 2048, 2**16), (4, 8192, 2**16), (8, 40, 1001)):
        x, kept = torch.empty(3, n, dtype=dtype), torch.empty(3, n)
        messages = torch.empty(3, -(-n // group) * (4 + group * bits // 8), dtype=torch.uint8)
        for seed, lost in ((None, None), (5, None), (None, kept), (5, kept)):
            name = f"3 x {n} in {bits} bits by {group}" + ", stochastic" * (seed is not None)
            name += ", kept" * (lost is not None)
            yield name, lambda x=x, to=messages, code=(bits, group, seed, lost): _write(x, to, *code)


def _write(x: torch.Tensor, messages: torch.Tensor, bits: int, group: int, seed: int | None, kept: object) -> None:
    quantize(x, messages, bits=bits, group=group, seed=seed, kept=kept)
