"""What blocks of a thread set for its own code, which torch keeps in flags of the process: modes, and what compiles."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import torch
from torch.utils import _python_dispatch

# Private: torch has no public way to them. Each block restores on leaving what it found, so that of two threads which
# enter one after the other, and leave in the same order, the second sets what the first had set: for ever.
_flags: Any = _python_dispatch
_core: Any = torch._C


@attrs.frozen
class ProcessFlags:
    """Those of all modes, of modes not torch's own, of those that keep torch.compile out, and of fake tensors' mode.

    In the last `torch.tensor` makes its values on the CPU first. And the stance of torch.compile, such as
    "force_eager", None for the default.
    """

    every: bool
    others: bool
    uncompiled: bool
    lifted: bool
    stance: Any

    @classmethod
    def now(cls) -> ProcessFlags:
        """Return the present flags."""
        return cls(
            _flags._is_in_torch_dispatch_mode,
            _flags._is_in_non_infra_torch_dispatch_mode,
            _flags._is_in_any_mode_without_ignore_compile_internals,
            _core._only_lift_cpu_tensors(),
            None
            if (compiler := _compiler()) is None or compiler._stance == compiler.DynamoStance()
            else compiler._stance,
        )

    def restore(self) -> None:
        """Set the flags to these."""
        _flags._is_in_torch_dispatch_mode = self.every
        _flags._is_in_non_infra_torch_dispatch_mode = self.others
        _flags._is_in_any_mode_without_ignore_compile_internals = self.uncompiled
        _flags.set_is_in_mode_without_ignore_compile_internals(self.uncompiled)
        _core._set_only_lift_cpu_tensors(self.lifted)
        if (compiler := _compiler()) is not None:
            compiler._stance = self.stance or compiler.DynamoStance()


def _compiler() -> Any:
    """Return the module of torch.compile that has the stance; None where nothing has loaded it, which takes 1 s."""
    found = sys.modules.get("torch._dynamo.eval_frame")
    return found if hasattr(found, "_stance") else None
