"""Scale all gradients down so that their joint 2-norm is at most `max_norm`.

Fills:  condition, measure       State:  none
Law:    equals `torch.nn.utils.clip_grad_norm_` on the unscaled mean gradients, to rounding
Cost:   one pass over the gradients for the norm; the factor is applied inside the optimizer
Source: Pascanu et al. 2013, arXiv:1211.5063, algorithm 1

`clip_by_value`: clamp every element of the gradients to [-max_value, max_value].

Fills:  condition                State:  none
Law:    equals `torch.nn.utils.clip_grad_value_` on the unscaled mean gradients
Cost:   one pass over the gradients
Source: Mikolov 2012, Statistical language models based on neural networks, section 3.2.2
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from fds.errors import positive
from fds.step import Call, Gradients, Measure, Step, fill, foreach, transform


@attrs.frozen
class ClipNorm:
    """The gradient map: a larger divisor, no pass over the gradients."""

    max_norm: float
    takes_slices: ClassVar = True
    needs: ClassVar = "norm"
    draws: ClassVar = False

    def __call__(self, grads: Gradients, call: Call) -> Gradients:
        """Return the gradients with the clip factor in their scale."""
        grads = grads.measured()
        assert grads.norm is not None
        factor = ((grads.norm + 1e-6) / self.max_norm).clamp(min=1).double()
        scale = factor if grads.scale is None else grads.scale * factor
        return Gradients(grads.leaves, scale, (grads.norm / factor).to(grads.norm.dtype))


@transform(max_norm=positive(" takes a positive norm", "say, 1.0"))
def clip_by_global_norm(max_norm: float):
    """Multiply the gradients by min(1, max_norm / (norm + 1e-6)); `metrics["grad_norm"]` is the norm before.

    Raises `ComposeError` for a norm that is not positive.
    """

    def apply(step: Step) -> Step:
        return fill(step, condition=ClipNorm(float(max_norm)), measure=Measure(norm=True))

    return apply


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


@transform(max_value=positive(" takes a positive bound", "say, 0.5"))
def clip_by_value(max_value: float):
    """Clamp the elements of the mean gradients. Raises `ComposeError` for a bound that is not positive."""

    def apply(step: Step) -> Step:
        return fill(step, condition=ClipValue(float(max_value)))

    return apply
