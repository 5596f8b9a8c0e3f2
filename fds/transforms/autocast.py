"""Let torch choose the dtype of every operator from its lists; parameters keep theirs.

Fills:  context                  State:  none
Law:    equals `with torch.autocast(...)` around the loss
Cost:   a cast per operator input; weights are cast once a microbatch
Source: torch.amp; the counterpart of DeepSpeed's `amp` and `torch_autocast`
"""

from typing import Any, ClassVar

import attrs
import torch

from fds.errors import ComposeError
from fds.step import Call, Step, fill, transform


@attrs.frozen
class Autocast:
    """The context in which the loss runs, in training and in evaluation."""

    dtype: torch.dtype
    draws: ClassVar = False

    def __call__(self, call: Call) -> Any:
        """Return the context for the device of a call."""
        return torch.autocast(call.device.type, dtype=self.dtype)


@transform
def autocast(dtype: torch.dtype = torch.bfloat16):
    """Evaluate the loss under `torch.autocast` of this dtype; with `torch.float16` add `loss_scale()`.

    Raises `ComposeError` for a dtype that is not 16 bit.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ComposeError("autocast takes a 16-bit dtype", got=repr(dtype), want="torch.bfloat16 or torch.float16")

    def apply(step: Step) -> Step:
        return fill(step, context=Autocast(dtype))

    return apply
