"""Random numbers of what fills the stations of a step: each filler draws its own, from the key of the state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from fds import random
from fds.layout import Segment
from fds.state import State


def seeded(
    state: State, functions: Iterable, *data: int | str, evaluating: bool = False
) -> contextlib.AbstractContextManager:
    """Return a scope in which these functions draw from the state's key, its calls and `data`.

    Where none of them may draw (their attribute `draws` is False) it costs nothing.
    """
    if not any(map(random.draws, functions)):
        return contextlib.nullcontext()
    kind = "evaluate" if evaluating else "step"
    return random.seeded(state.key, kind, int(state.calls), *data, devices=[state.step.device])


def tie(
    share: Callable[[str, Tensor], None], one: Any, leaves: Sequence[Tensor | None],
    segments: Sequence[Sequence[Segment]],
) -> None:  # fmt: skip
    """Let ranks that hold the same parameters have the same leaves for them, where `one` may have drawn for each.

    `share(name, leaf)` gives a leaf the values that it has on the first rank that holds the parameter.
    """
    if random.draws(one):
        for leaf, inside in zip(leaves, segments, strict=True):
            if leaf is not None and inside:
                share(inside[0].name, leaf)
