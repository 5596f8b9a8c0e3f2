"""Page-locked memory of exact sizes: mapped, and registered with the driver, so that a GPU copies beside the host.

torch's own pinned memory is rounded up to powers of two, and never given back to the system.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from fds.media.mapping import map_memory, pages, unmap
from fds.media.tensors import over, owned

_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs


def locked(nbytes: int, gpu: torch.device) -> Tensor:
    """Return memory (nbytes,) uint8, of whole pages, that is unlocked and unmapped when nobody holds it.

    Where the driver refuses it is not locked, so that copies wait, and a warning says why. Raises `OSError`, and
    `RuntimeError` in a forked process, where there is no driver.
    """
    driver: Any = torch.cuda.cudart()
    here, size = torch.cuda.device(gpu), pages(nbytes)
    address = map_memory(size)
    with here:
        code = int(driver.cudaHostRegister(address, size, _PORTABLE))
    if code:
        with contextlib.suppress(RuntimeError):  # the driver remembers the error, and the next kernel would raise it
            torch.empty(1, device=gpu).fill_(0)
        warnings.warn(
            f"memory of the host is not page-locked, so copies wait for {gpu}: the driver refused {size:,} bytes "
            f"({driver.cudaGetErrorString(driver.cudaError(code))})",
            RuntimeWarning,
            stacklevel=2,
        )
    owner = owned(address, size, _released, address, size, None if code else driver, here, os.getpid())
    return over(owner, torch.empty(nbytes, dtype=torch.uint8, device="meta"))


def _released(address: int, size: int, driver: Any, here: torch.cuda.device, pid: int) -> None:
    if driver is not None and pid == os.getpid():  # a forked process has none
        with here:  # in whichever thread this is
            if int(driver.cudaHostUnregister(address)):
                return  # it stays the driver's
    unmap(address, size)
