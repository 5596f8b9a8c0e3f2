"""Modules in mixed precision: submodules of a 16-bit module that compute in float32, and errors of mixed dtypes."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from fds import tree
from fds.errors import LossError


def in_float32(module: nn.Module, patterns: Sequence[str], *, low: bool, prefix: str) -> None:
    """Make submodules compute in float32 if all of their own parameters match a pattern; if `low`, batch norms too."""
    for path, part in module.named_modules():
        own = [f"{prefix}{path}.{n}" if path else prefix + n for n, _ in part.named_parameters(recurse=False)]
        kept = own and all(any(fnmatch.fnmatchcase(n, p) for p in patterns) for n in own)
        if kept or (low and isinstance(part, nn.modules.batchnorm._NormBase)):
            part.forward = _float32(part, part.forward)


def _float32(part: nn.Module, forward: Callable) -> Callable:
    """Return `forward` of a module with inputs and parameters cast to float32, and outputs cast back."""

    def run(*args: Any, **kwargs: Any) -> Any:
        low = next((x.dtype for x in tree.leaves((args, kwargs)) if tree.is_low(x)), None)
        if low is None:
            return forward(*args, **kwargs)
        args, kwargs = tree.map(lambda x: x.float() if tree.is_low(x) else x, (args, kwargs))
        held = dict(part._parameters)
        low_ones = {n: p for n, p in held.items() if p is not None and tree.is_low(p)}
        part._parameters.update({n: cast(nn.Parameter, p.float()) for n, p in low_ones.items()})
        try:
            out = forward(*args, **kwargs)
        finally:
            part._parameters.update(held)
        return tree.map(lambda x: x.to(low) if tree.is_float(x) else x, out)

    return run


def raise_if_mixed(error: RuntimeError, params: dict, buffers: dict) -> None:
    """Raise `LossError` if this is an error of mixed dtypes, which float32 buffers of a 16-bit module may explain."""
    wide = [name for name, b in buffers.items() if b.dtype is torch.float32]
    if not wide or not re.search("dtype|scalar type|should be the same", str(error)):
        return
    low = next((str(p.dtype).removeprefix("torch.") for p in params.values() if tree.is_low(p)), "bfloat16")
    raise LossError(
        "an operator received both 16-bit and float32 tensors, and the module has float32 buffers",
        where=", ".join(wide),
        got=str(error).partition("\n")[0],
        want=f"self.{wide[0]}.to(x.dtype) in forward",
        hint=f"or module.{wide[0]} = module.{wide[0]}.{low}() before fds.functional(module): precision casts no "
        "buffers, since some (rotary frequencies, counts) are wrong in 16 bits",
    ) from error
