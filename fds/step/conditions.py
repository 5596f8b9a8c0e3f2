"""The station `condition`: a gradient map is given the leaves, and what it makes of them goes where they live."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from torch import Tensor

from fds import random
from fds.step.call import Call
from fds.step.checks import contracts
from fds.step.checks.draws import tie
from fds.step.gradients import Gradients

Map = Callable[[Gradients, Call], Gradients]
Share = Callable[[str, Tensor], None]


def conditioned(one: Map, grads: Gradients, known: Gradients, call: Call, share: Share) -> Gradients:
    """Return what a gradient map makes of gradients: all leaves at once, or as many as it `needs`.

    `known` are those before all maps; `share` gives a leaf the values that it has on the first rank that holds it.
    """
    needs = getattr(one, "needs", None)
    if grads.landing is None or needs == "norm":
        found = contracts.gradients(one(grads, call), known, one)
        tie(share, one, found.leaves, known.segments)
        return found
    if needs == "slices" and not random.draws(one) and grads.leaves:
        return _one_at_a_time(one, grads.measured(), call, share)
    landing = grads.landing
    given = attrs.evolve(grads, leaves=[landing.value(i, x) for i, x in enumerate(grads.leaves)], landing=None)
    found = conditioned(one, given, given, call, share)
    return attrs.evolve(found, leaves=[landing.land(i, x) for i, x in enumerate(found.leaves)], landing=landing)


def _one_at_a_time(one: Map, grads: Gradients, call: Call, share: Share) -> Gradients:
    landing, leaves, found = grads.landing, list(grads.leaves), grads
    assert landing is not None
    for i, x in enumerate(leaves):
        given = attrs.evolve(
            grads,
            leaves=[landing.value(i, x)],
            segments=grads.segments[i : i + 1],
            counted=grads.counted[i : i + 1],
            landing=None,
        )
        found = conditioned(one, given, given, call, share)
        leaves[i] = landing.land(i, found.leaves[0])
    return attrs.evolve(grads, leaves=leaves, scale=found.scale, norm=found.norm)
