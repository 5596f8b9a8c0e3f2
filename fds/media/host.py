"""The host: memory of the CPU, pageable, beside what a step computes in."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from fds.media.device import Device
from fds.media.tensors import Leaf, leaves, nbytes_of, over, owned


@attrs.frozen
class Host(Device):
    """Memory of the CPU, of exact sizes and not pinned, read and written as a device's: a copy waits for a GPU."""

    name = "host"

    def make(self, x: Tensor) -> Tensor:
        """Return memory on the CPU."""
        if not (nbytes := nbytes_of(x)):
            return torch.empty(x.shape, dtype=x.dtype, device="cpu")
        base = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        address = base.data_ptr()
        leaf = over(owned(address, nbytes, _freed, address, base), x)
        leaves[address] = Leaf(self)
        return leaf


def _freed(address: int, base: Tensor) -> None:
    leaves.pop(address, None)
