"""Leave parameters as they are: no gradient, no gradient bytes, no optimizer state.

Fills:  frozen                   State:  none
Law:    equals the step on the other parameters alone, with the frozen ones as constants
Cost:   less: backward computes no gradient for them
Source: requires_grad_(False), as a value
"""

from fds.errors import ComposeError, is_a
from fds.step import Step, fill, transform


@transform
def freeze(*patterns: str):
    """Freeze the parameters whose names match any pattern (`"embedding.*"`; `*` crosses dots).

    Raises `ComposeError` without patterns; `StateError` at init for a pattern that matches nothing.
    """
    if not patterns or not all(is_a(p, str) for p in patterns):
        raise ComposeError("freeze takes patterns of parameter names", got=repr(patterns), want='say, "embedding.*"')

    def apply(step: Step) -> Step:
        for pattern in patterns:
            step = fill(step, frozen=pattern)
        return step

    return apply
