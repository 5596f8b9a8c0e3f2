"""Leave parameters as they are: no gradient, no gradient bytes, no optimizer state.

Fills:  frozen                   State:  none
Law:    equals the step on the other parameters alone, with the frozen ones as constants
Cost:   less: backward computes no gradient for them
Source: requires_grad_(False), as a value
"""

from collections.abc import Sequence

from fds.errors import ComposeError, is_a
from fds.step import AllBut, Step, fill, transform


@transform
def freeze(*patterns: str, all_but: Sequence[str] = ()):
    """Freeze the parameters whose names match any pattern (`"embedding.*"`; `*` crosses dots), or all but some.

    Raises `ComposeError` without patterns, or with both kinds; `StateError` at init for a pattern that matches nothing.
    """
    both = [*patterns, *all_but]
    if not both or not all(is_a(p, str) for p in both) or (patterns and all_but) or isinstance(all_but, str):
        raise ComposeError(
            "freeze takes patterns of parameter names",
            got=f"{patterns!r}, all_but={all_but!r}" if all_but else repr(patterns),
            want='say, freeze("embedding.*"), or freeze(all_but=("head.*",))',
        )

    def apply(step: Step) -> Step:
        for one in [AllBut(tuple(all_but))] if all_but else patterns:
            step = fill(step, frozen=one)
        return step

    return apply
