"""Launches of dropout, to be compiled for a GPU that is not there."""

from collections.abc import Callable, Iterator

import torch

from fds.kernels.dropout_add import bias_dropout_add, dropout


def cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], object]]]:
    for rows, columns in ((64, 1024), (8, 65536), (431, 123)):
        x, residual = (torch.empty(rows, columns, dtype=dtype, requires_grad=True) for _ in range(2))
        bias = torch.empty(columns, dtype=dtype, requires_grad=True)
        at = f"{rows} x {columns}"
        yield f"{at}, all", lambda x=x, b=bias, r=residual: bias_dropout_add(x, b, r, p=0.1, seed=1).backward(x)
        if columns == 1024:
            yield f"{at}, p > 1/2", lambda x=x, b=bias, r=residual: bias_dropout_add(x, b, r, p=0.6, seed=1).backward(x)
            yield f"{at}, p = 0", lambda x=x, b=bias, r=residual: bias_dropout_add(x, b, r, p=0).backward(x)
            yield f"{at}, no bias", lambda x=x, r=residual: bias_dropout_add(x, None, r, p=0.1, seed=1).backward(x)
            yield f"{at}, alone", lambda x=x: dropout(x, p=0.1, seed=1).backward(x)
