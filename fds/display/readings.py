"""Read the metrics of many steps at once: the only place where the display waits for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def read(many: Sequence[Mapping[str, Any]]) -> list[dict[str, float | int | bool]]:
    """Return the scalars of each mapping as numbers, with one copy from each device and dtype; others are left out.

    Tensors of one element and plain numbers are scalars.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, str, Tensor]]] = {}
    rows: list[dict[str, Any]] = []
    for i, metrics in enumerate(many):
        rows.append({name: x for name, x in metrics.items() if isinstance(x, int | float)})
        for name, x in metrics.items():
            if isinstance(x, Tensor) and x.numel() == 1:
                groups.setdefault((x.device, x.dtype), []).append((i, name, x.detach().reshape(())))
    for group in groups.values():
        values = torch.stack([x for _, _, x in group]).tolist()
        for (i, name, _), value in zip(group, values, strict=True):
            rows[i][name] = value
    return [{name: row[name] for name in metrics if name in row} for row, metrics in zip(rows, many, strict=True)]
