"""The stations `batch` and `split`: from what a call is given to its microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from fds import tree
from fds.microbatches import Microbatches
from fds.step.batch import Split
from fds.step.call import Call, seeded
from fds.step.checks import contracts

Map = Callable[[Any, Call], Any]


@attrs.frozen(eq=False)
class Given:
    """A batch after the stations `batch` and `split`: its microbatches, or what went wrong there."""

    batch: Any  # as it was given
    count: int  # of microbatches, here and on every other rank
    microbatches: list[Any] | None = None  # None where this rank needs none
    error: Exception | None = None


def cut(batch: Any, maps: tuple[Map, ...], split: Split, call: Call, part: int = 0) -> list[Any]:
    """Return the microbatches of a batch. Raises `BatchError`.

    `Microbatches` are cut already: the maps are given each of them, `part` by `part`.
    """
    if isinstance(batch, Microbatches):
        parts = enumerate(split.demand(batch))
        return [one for i, held in parts for one in cut(held, maps, Split(1), call, i)]
    share, _ = call.dimensions.share_of_batch
    if maps:
        batch = tree.copied(batch)  # whose containers a map may fill
    for i, one in enumerate(maps):
        own = call.at("batch", i, share, part)
        with seeded(own, [one]):
            batch = contracts.batch(one(batch, own), batch, one)
    with seeded(call, [split], "split", share, part):
        return contracts.microbatches(split(batch), split)
