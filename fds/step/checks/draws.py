"""Random numbers for parameters that several ranks hold: each rank may draw its own, and the first one's are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fds import random
from fds.layout import Segment


def tie(
    share: Callable[[str, Tensor], None],
    one: Any,
    leaves: Sequence[Tensor | None],
    segments: Sequence[Sequence[Segment]],
) -> None:
    """Make the leaves of tied parameters equal again on all their ranks, where the filler `one` may draw.

    `share(name, leaf)` gives a leaf the values that it has on the first rank that holds the parameter.
    """
    if random.draws(one):
        for leaf, inside in zip(leaves, segments, strict=True):
            if leaf is not None and inside:
                share(inside[0].name, leaf)
