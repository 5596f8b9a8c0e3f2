"""Launches of layer normalisation, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels.normalization import add_layer_norm, layer_norm

# Few, each row of the launch tables, beyond them, and what has no vectors of 16 bytes.
COLUMNS = [42, 1000, 1024, 4096, 8191, 8192, 12296, 65536, 131072]


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    for columns in COLUMNS:
        x, residual = (torch.empty(64, columns, dtype=dtype, requires_grad=True) for _ in range(2))
        weight, bias = (torch.empty(columns, requires_grad=True) for _ in range(2))

        def plain(x=x, weight=weight, bias=bias) -> None:
            layer_norm(x, weight, bias).backward(x)

        yield f"{columns} columns", plain
        if columns == 4096:

            def same(x=x, weight=weight, bias=bias, dtype=dtype) -> None:
                layer_norm(x, weight.to(dtype), bias.to(dtype)).backward(x)

            yield f"{columns} columns, weight of x's dtype", same
        if columns in (8192, 65536):

            def fused(x=x, residual=residual, weight=weight, bias=bias, invertible=False) -> None:
                torch.autograd.backward(add_layer_norm(x, residual, weight, bias, invertible=invertible), (x, x))

            def recovered(fused=fused) -> None:
                fused(invertible=True)

            def twice(x=x, residual=residual, weight=weight, bias=bias) -> None:
                layer_norm(x, weight, bias, residual=residual, invertible=True).backward(x)

            def bare(x=x, residual=residual) -> None:
                layer_norm(x, residual=residual, invertible=True).backward(x)

            yield from [
                (f"{columns} columns, sum", fused),
                (f"{columns} columns, sum, invertible", recovered),
                (f"{columns} columns, sum made twice", twice),
                (f"{columns} columns, bare", bare),
            ]
