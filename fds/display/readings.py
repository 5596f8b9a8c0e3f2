"""Read the metrics of many steps at once: the only place where the display waits for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Reading:
    """Scalars on their way to the host.

    Attributes:
        rows: the mappings that are read, each with the numbers that were on the host from the beginning.
        copies: the tensors' values, and to which row and name each belongs.
        events: what a GPU does after it has copied them.
    """

    rows: Sequence[tuple[Mapping[str, Any], dict[str, Any]]]
    copies: Sequence[tuple[Tensor, list[tuple[int, str]]]]
    events: Sequence[torch.cuda.Event]

    @property
    def has_arrived(self) -> bool:
        """Whether `numbers` need not wait."""
        return all(event.query() for event in self.events)

    def numbers(self) -> list[dict[str, float | int | bool]]:
        """Return the scalars of each mapping as numbers, waiting for those that have not arrived."""
        for event in self.events:
            event.synchronize()
        numbers = [dict(row) for _, row in self.rows]
        for values, places in self.copies:
            for (i, name), value in zip(places, values.tolist(), strict=True):
                numbers[i][name] = value
        rows = zip(numbers, self.rows, strict=True)
        return [{name: row[name] for name in metrics if name in row} for row, (metrics, _) in rows]


def begin(many: Sequence[Mapping[str, Any]]) -> Reading:
    """Copy the scalars of each mapping aside, with one copy from each device and dtype, and wait for none of them.

    Tensors of one element and plain numbers are scalars; others are left out. A copy from a GPU goes to page-locked
    memory.
    """
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[tuple[int, str]]]] = {}
    rows = [(metrics, {name: x for name, x in metrics.items() if isinstance(x, int | float)}) for metrics in many]
    for i, metrics in enumerate(many):
        for name, x in metrics.items():
            if isinstance(x, Tensor) and x.numel() == 1:
                tensors, places = groups.setdefault((x.device, x.dtype), ([], []))
                tensors.append(x.detach().reshape(()))
                places.append((i, name))
    copies = [(torch.stack(tensors), places) for tensors, places in groups.values()]
    gpus = dict.fromkeys(values.device for values, _ in copies if values.device.type == "cuda")
    copies = [(v.to("cpu", non_blocking=True) if v.device in gpus else v, places) for v, places in copies]
    events = [torch.cuda.Event() for _ in gpus]
    for event, gpu in zip(events, gpus, strict=True):
        event.record(torch.cuda.current_stream(gpu))
    return Reading(rows, copies, events)


def read(many: Sequence[Mapping[str, Any]]) -> list[dict[str, float | int | bool]]:
    """Return the scalars of each mapping as numbers, as `begin` copies them, and wait for them."""
    return begin(many).numbers()
