"""The host: memory of the CPU, beside what a step computes in; page-locked where that is a GPU."""

from __future__ import annotations

import os

import attrs
import torch
from torch import Tensor

from fds.media.device import Device
from fds.media.locked import locked
from fds.media.tensors import Leaf, leaves, nbytes_of, over, owned


@attrs.frozen
class Host(Device):
    """Memory of the CPU, of exact sizes; for tensors of a GPU page-locked, and copied beside what that computes.

    Attributes:
        cached: whether it is torch's pinned memory instead: taken and given back in no time, in powers of two.
    """

    cached: bool = False
    name = "host"

    def make(self, x: Tensor) -> Tensor:
        """Return memory on the CPU."""
        if not (nbytes := nbytes_of(x)):
            return torch.empty(x.shape, dtype=x.dtype, device="cpu")
        if x.is_cuda and not self.cached:
            base = locked(nbytes, x.device)
        else:
            base = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=x.is_cuda)
        address = base.data_ptr()
        leaf = over(owned(address, nbytes, _freed, address, base), x)
        leaves[address] = Leaf(self)
        return leaf


def _freed(address: int, base: Tensor) -> None:
    """Let memory go, once no GPU copies from it, or to it, any more."""
    leaf = leaves.pop(address, None)
    if leaf is not None and leaf.copied is not None:
        done, pid = leaf.copied
        if pid == os.getpid():
            done.synchronize()
