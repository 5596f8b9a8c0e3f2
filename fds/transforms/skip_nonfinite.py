"""Skip the update of a step whose gradients are not all finite.

Fills:  commit, measure          State:  none
Law:    a skipped step leaves params, opt, buffers, step and slots bit-equal; other steps are untouched
Cost:   one pass over the gradients for their norm; no host synchronisation
Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2
"""

from typing import Any, ClassVar

import attrs
from torch import Tensor

from fds.step import Measure, Step, fill, transform


@attrs.frozen
class Skip:
    """The commit: slots do not change on a skipped step."""

    draws: ClassVar = False

    def __call__(self, slots: dict[str, Any], skip: Tensor) -> dict[str, Any]:
        """Return the slots as they are."""
        return slots


@transform
def skip_nonfinite():
    """Leave everything but `state.calls` as it was where a gradient is NaN or infinite; `metrics["skipped"]` says so.

    The count of skipped steps is `state.calls - state.step`.
    """

    def apply(step: Step) -> Step:
        return fill(step, commit=Skip(), measure=Measure(norm=True), instead=None, hint="a loss scale skips already")

    return apply
