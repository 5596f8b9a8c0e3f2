"""The device: ordinary memory, where a step runs; what passes between a GPU and the host is copied beside that."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from fds.media import streams


@attrs.frozen
class Device:
    """The memory that a step computes in."""

    name = "device"

    def make(self, x: Tensor) -> Tensor:
        """Return fresh memory on the device of `x`."""
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def read(self, leaves: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Return copies; those between the host and a GPU are begun at once."""
        cuda = device.type == "cuda"
        if not any(x.is_cuda != cuda for x in leaves):
            return lambda: [x.to(device, copy=True) for x in leaves]
        copies = [torch.empty(x.shape, dtype=x.dtype, device=device, pin_memory=x.is_cuda and not cuda) for x in leaves]
        wait = streams.start(copies, leaves)

        def done() -> list[Tensor]:
            wait()
            return copies

        return done

    def write(self, worked: list[Tensor], new: list[Tensor]) -> Callable[[], None]:
        """Write at once, or begin to write between the host and a GPU."""
        return streams.start(new, worked)


DEVICE = Device()
