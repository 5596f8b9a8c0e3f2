"""Multiply the loss by a constant, so that small 16-bit gradients do not vanish; divide it out again.

Fills:  scale, measure           State:  none
Law:    at a power of two the identity, bit for bit, while nothing is subnormal or overflows
Cost:   one pass over the gradients for their norm; no host synchronisation
Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2
"""

import math
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from fds.errors import ComposeError, is_a
from fds.step import Measure, Step, fill, transform


@attrs.frozen
class StaticScale:
    """A constant scale."""

    value: float
    draws: ClassVar = False

    def scale(self, slots: dict[str, Any], device: torch.device) -> Tensor:
        """Return the scale, () float64."""
        return torch.full((), self.value, dtype=torch.float64, device=device)

    def metrics(self, slots: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
        """Return `loss_scale`."""
        return {"loss_scale": self.scale(slots, device)}


@transform
def static_loss_scale(scale: float = 2.0**16):
    """Scale the loss by a constant; a step whose gradients are not all finite is skipped.

    Raises `ComposeError` for a scale that is not positive and finite.
    """
    if not (is_a(scale, int | float) and math.isfinite(scale) and scale > 0):
        raise ComposeError("static_loss_scale takes a positive number", got=repr(scale), want="say, 2.0**16")

    def apply(step: Step) -> Step:
        static = StaticScale(float(scale))
        return fill(step, scale=static, measure=Measure(norm=True, skips=True), hint="one loss scale is enough")

    return apply
