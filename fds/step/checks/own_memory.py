"""Parameters that begin a run are finite, and each has memory of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fds import tree
from fds.errors import StateError


def check_own(params: Any) -> None:
    """Raise `StateError` for leaves of a tree that are not finite, or that share memory."""
    named = tree.paths(params)
    seen: dict[tuple[torch.device, int], dict[str, Tensor]] = {}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            continue
        if x.numel() and not x.is_meta:
            others = seen.setdefault((x.device, x.untyped_storage().data_ptr()), {})
            for other, y in others.items():
                if overlap(x, y):
                    raise StateError(
                        "two parameters share their memory, and a copy would untie them",
                        where=name,
                        got=f"memory of {other!r}",
                        want="each parameter once",
                        hint="leave one name out (fds.functional and TiedLayerSpec do), and use it twice in the loss",
                    )
            others[name] = x
        check_finite(name, x)


def check_finite(name: str, x: Tensor) -> None:
    """Raise `StateError` for a leaf with NaN or infinite elements."""
    if x.is_floating_point() and not x.is_meta and not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).sum())
        raise StateError(
            "a parameter is not finite",
            where=name,
            got=f"{bad} of {x.numel()} elements NaN or infinite",
            want="finite initial values",
        )


def overlap(x: Tensor, y: Tensor) -> bool:
    """Say whether two tensors of one storage share an element."""
    (a, b), (c, d) = ((t.storage_offset(), t.storage_offset() + _extent(t)) for t in (x, y))
    if x.dtype != y.dtype or b <= c or d <= a:
        return b > c and d > a
    used = torch.zeros(max(b, d), dtype=torch.bool)
    used.as_strided(x.shape, x.stride(), a).fill_(True)
    return bool(used.as_strided(y.shape, y.stride(), c).any())


def _extent(x: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
