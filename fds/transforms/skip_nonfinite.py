"""Skip the update of a step whose gradients are not all finite.

Fills:  measure                  State:  none
Law:    a skipped step leaves params, opt, buffers, step and slots bit-equal; other steps are untouched
Cost:   one pass over the gradients for their norm; no host synchronisation
Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2
"""

from fds.step import Measure, Step, fill, transform


@transform
def skip_nonfinite():
    """Leave everything but `state.calls` as it was where a gradient is NaN or infinite; `metrics["skipped"]` says so.

    The count of skipped steps is `state.calls - state.step`.
    """

    def apply(step: Step) -> Step:
        return fill(step, measure=Measure(norm=True, skips=True), instead=None, hint="a loss scale skips already")

    return apply
