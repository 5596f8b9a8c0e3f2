"""Launches of rotary embeddings, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels._rotary import rotary


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    plain = [(head, head, False) for head in (64, 128, 80, 100)]  # halves of 32, 64, 40 and 50 elements
    for head, part, interleaved in (*plain, (128, 128, True), (96, 24, False)):
        x = torch.empty(2, 64, 16, head, dtype=dtype, requires_grad=True).transpose(1, 2)  # (B, heads, T, D), seen so
        for tables in (torch.float32, dtype):
            angles = torch.empty(64, part // 2, dtype=tables)
            yield f"{part} of {head}, {interleaved=}, tables {tables}", _both(x, angles, interleaved)
    angles = torch.empty(2, 16, 64, 48, dtype=dtype)
    yield "tables of each head", _both(x, angles, False)


def _both(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> Callable[[], object]:
    return lambda: rotary(x, angles, angles, interleaved=interleaved).sum().backward()
