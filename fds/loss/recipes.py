"""Recipes: how to make the parameters of a run from a key, a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
from torch import Tensor, nn

from fds import random


@attrs.frozen(eq=False)
class Recipe:
    """A function `key -> params` that also says what it would make, and makes it in pieces.

    Attributes:
        trace: `trace() -> params` on `meta`: nothing is allocated or drawn.
        pieces: `pieces(key)` yields `{name: tensor}`, a layer at a time.
    """

    trace: Callable[[], dict[str, Tensor]]
    pieces: Callable[[Tensor], Iterator[dict[str, Tensor]]]

    def __call__(self, key: Tensor) -> dict[str, Tensor]:
        """Return all parameters, in the order of the trace."""
        made = {name: x for piece in self.pieces(key) for name, x in piece.items()}
        return {name: made[name] for name in self.trace()}


def recipe(module_factory: Callable[[], nn.Module]) -> Recipe:
    """Make `key -> params` of a function that builds a module: for `step.init(fds.recipe(GPT), key=0)`.

    The factory runs with torch's generators seeded from the key; names are those of `named_parameters`.
    """

    def pieces(key: Tensor) -> Iterator[dict[str, Tensor]]:
        with random.seeded(key):
            params = {name: p.detach() for name, p in module_factory().named_parameters()}
        yield params

    def trace() -> dict[str, Tensor]:
        return {name: x.to("meta") for name, x in next(pieces(random.key(0))).items()}

    return Recipe(trace, pieces)
