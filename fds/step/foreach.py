"""torch's operators on lists of tensors, one call for many; torch has no names for them without an underscore."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Tensors = list[Tensor] | tuple[Tensor, ...]

# Where torch defines them is private too, and it does not list them among what it exports.
copy_: Callable[[Tensors, Tensors], object] = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
add_: Callable[[Tensors, Tensors], object] = torch._foreach_add_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
zero_: Callable[[Tensors], object] = torch._foreach_zero_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
clamp_min_: Callable[[Tensors, float], object] = torch._foreach_clamp_min_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
clamp_max_: Callable[[Tensors, float], object] = torch._foreach_clamp_max_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
norm: Callable[..., Sequence[Tensor]] = torch._foreach_norm  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def cast(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return tensors in these dtypes, as `Tensor.to` does: one call for all of a pair of dtypes, not one for each."""
    cast = list(tensors)
    pairs: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
    for i, (x, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
        if x.dtype != dtype:
            cast[i] = torch.empty_like(x, dtype=dtype)
            new, old = pairs.setdefault((x.dtype, dtype, x.device), ([], []))
            new.append(cast[i])
            old.append(x)
    for new, old in pairs.values():
        copy_(new, old)
    return cast
