"""Scale all gradients down so that their joint 2-norm is at most `max_norm`.

Fills:  condition, measure       State:  none
Law:    equals `torch.nn.utils.clip_grad_norm_` on the unscaled mean gradients, to rounding
Cost:   one pass over the gradients for the norm; the factor is applied inside the optimizer
Source: Pascanu et al. 2013, arXiv:1211.5063, algorithm 1
"""

from typing import ClassVar

import attrs

from fds.errors import ComposeError, is_a
from fds.step import Call, Gradients, Measure, Step, fill, transform


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


@transform
def clip_by_global_norm(max_norm: float):
    """Multiply the gradients by min(1, max_norm / (norm + 1e-6)); `metrics["grad_norm"]` is the norm before.

    Raises `ComposeError` for a norm that is not positive.
    """
    if not (is_a(max_norm, int | float) and max_norm > 0):
        raise ComposeError("clip_by_global_norm takes a positive norm", got=repr(max_norm), want="say, 1.0")

    def apply(step: Step) -> Step:
        return fill(step, condition=ClipNorm(float(max_norm)), measure=Measure(norm=True))

    return apply
