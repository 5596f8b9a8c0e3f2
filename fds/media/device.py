"""The device: ordinary memory, where a step runs."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Device:
    """The memory that a step computes in."""

    name = "device"

    def make(self, x: Tensor) -> Tensor:
        """Return fresh memory on the device of `x`."""
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def read(self, leaves: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Return copies."""
        return lambda: [x.to(device, copy=True) for x in leaves]

    def write(self, worked: list[Tensor], new: list[Tensor]) -> Callable[[], None]:
        """Write at once."""
        torch._foreach_copy_(new, worked)
        return lambda: None


DEVICE = Device()
