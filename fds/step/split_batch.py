"""The stations `batch` and `split`: from what a call is given to its microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

from fds import random, tree
from fds.microbatches import Microbatches
from fds.step.batch import Split, place
from fds.step.call import Call, seeded
from fds.step.checks import contracts

Map = Callable[[Any, Call], Any]


@attrs.frozen(eq=False)
class SplitBatch:
    """A batch after the stations `batch` and `split`: its microbatches, or what went wrong there."""

    batch: Any  # as it was given
    count: int  # of microbatches, here and on every other rank
    microbatches: list[Any] | None = None  # None where this rank needs none
    error: Exception | None = None
    parts: list[Any] | None = None  # the batch after the maps; of `Microbatches` every one of them


def split_batch(batch: Any, maps: tuple[Map, ...], split: Split, call: Call) -> SplitBatch:
    """Return a batch through its maps and the split. Raises `BatchError`.

    `Microbatches` are cut already: the maps are given each of them, which are as many as `split` makes.
    """
    is_cut = isinstance(batch, Microbatches)
    parts = [_mapped(one, maps, call, i) for i, one in enumerate(split.checked(batch) if is_cut else [batch])]
    found = cut(parts, Split(1) if is_cut else split, call)
    return SplitBatch(batch, len(found), found, parts=parts)


def cut(parts: list[Any], split: Split, call: Call) -> list[Any]:
    """Return the microbatches of mapped parts of a batch, each cut by `split`. Raises `BatchError`."""
    if not random.draws(split):
        return [x for part in parts for x in contracts.microbatches(split(part), split)]
    share, _ = call.dimensions.share_of_batch
    microbatches: list[Any] = []
    for i, part in enumerate(parts):
        with seeded(call, [split], "split", share, i):
            microbatches += contracts.microbatches(split(part), split)
    return microbatches


def _mapped(batch: Any, maps: tuple[Map, ...], call: Call, part: int) -> Any:
    if not maps:
        return batch
    share, _ = call.dimensions.share_of_batch
    rows, given = [x for x in tree.leaves(batch) if isinstance(x, Tensor) and not x.is_inference()], batch
    versions = list(map(tree.version_of, rows))
    batch = tree.copied(batch)  # whose containers a map may fill
    for i, one in enumerate(maps):
        own = call.given_to(one, "batch", i, share, part)
        with seeded(own, [one]):
            batch = contracts.batch(one(batch, own), batch, one)
        if (now := list(map(tree.version_of, rows))) != versions:
            changed = {id(x) for x, a, b in zip(rows, now, versions, strict=True) if a != b}
            written = [place(path) for path, x in tree.paths(given).items() if id(x) in changed]
            raise contracts.written_rows(one, tree.named(written))
    return batch
