"""Clamp every element of the gradients to [-max_value, max_value].

Fills:  condition                State:  none
Law:    equals `torch.nn.utils.clip_grad_value_` on the unscaled mean gradients
Cost:   one pass over the gradients
Source: Mikolov 2012, Statistical language models based on neural networks, section 3.2.2
"""

from typing import ClassVar

import attrs

from fds.errors import ComposeError, is_a
from fds.step import Call, Gradients, Step, fill, foreach, transform


@attrs.frozen
class ClipValue:
    """The gradient map: unscale and clamp in place."""

    max_value: float
    takes_slices: ClassVar = True
    needs: ClassVar = "slices"
    draws: ClassVar = False

    def __call__(self, grads: Gradients, call: Call) -> Gradients:
        """Return the clamped gradients; their scale is 1 from here on."""
        if grads.leaves:
            if grads.scale is not None:
                for leaf in grads.leaves:
                    leaf.div_(grads.scale)
            foreach.clamp_min_(grads.leaves, -self.max_value)
            foreach.clamp_max_(grads.leaves, self.max_value)
        return Gradients(grads.leaves, None)


@transform
def clip_by_value(max_value: float):
    """Clamp the elements of the mean gradients. Raises `ComposeError` for a bound that is not positive."""
    if not (is_a(max_value, int | float) and max_value > 0):
        raise ComposeError("clip_by_value takes a positive bound", got=repr(max_value), want="say, 0.5")

    def apply(step: Step) -> Step:
        return fill(step, condition=ClipValue(float(max_value)))

    return apply
