"""What Triton asks the driver of a GPU, answered for one that is not there: kernels compile, and none can run."""

from __future__ import annotations

import attrs
import torch
from triton.backends.compiler import GPUTarget


@attrs.frozen
class AbsentGpu:
    """The driver; no subclass of Triton's, whose constructor looks for a GPU."""

    capability: int = 90  # as Triton writes it, 90 for 9.0: an H200's

    def get_current_target(self) -> GPUTarget:
        """Return what to compile for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Return the first."""
        return 0

    def get_current_stream(self, device: object = None) -> int:
        """Return the default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return where the tensors are."""
        return torch.device("cpu")
