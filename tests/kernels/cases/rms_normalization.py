"""Launches of RMS normalisation, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels.normalization import add_rms_norm, rms_norm

# Of the kernels in fds.kernels.normalization_*, layer_normalization's cases hold the rest.
COLUMNS = [1024, 8192, 65536]


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    for columns in COLUMNS:
        x, residual = (torch.empty(64, columns, dtype=dtype, requires_grad=True) for _ in range(2))
        weight = torch.empty(columns, requires_grad=True)

        def plain(x=x, weight=weight) -> None:
            rms_norm(x, weight).backward(x)

        yield f"{columns} columns", plain
        if columns in (8192, 65536):

            def fused(x=x, residual=residual, weight=weight, invertible=False) -> None:
                torch.autograd.backward(add_rms_norm(x, residual, weight, invertible=invertible), (x, x))

            def recovered(fused=fused) -> None:
                fused(invertible=True)

            def bare(x=x, residual=residual) -> None:
                rms_norm(x, residual=residual, invertible=True).backward(x)

            yield from [
                (f"{columns} columns, sum", fused),
                (f"{columns} columns, sum, invertible", recovered),
                (f"{columns} columns, bare", bare),
            ]
