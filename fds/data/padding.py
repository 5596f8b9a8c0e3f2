"""`per_microbatch`: collate each microbatch separately, so that it is padded to its own longest row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from fds.errors import DataError, is_int
from fds.microbatches import Microbatches


@attrs.frozen
class PerMicrobatch:
    """A `collate` of a loader that returns `Microbatches`: see `per_microbatch`."""

    collate: Callable[[list], Any]
    num_microbatches: int

    def __call__(self, rows: list, seed: Callable[[int], None] = lambda row: None) -> Microbatches:
        """Return the collated microbatches of a share; `seed` is called with the index of each one's first row."""
        size, rest = divmod(len(rows), self.num_microbatches)
        if rest or not size:
            raise DataError(
                f"the share does not divide into {self.num_microbatches} microbatches",
                where="collate",
                got=f"{len(rows)} rows",
                want=f"a positive multiple of {self.num_microbatches}",
            )
        parts = []
        for begin in range(0, len(rows), size):
            seed(begin)
            parts.append(self.collate(rows[begin : begin + size]))
        return Microbatches(tuple(parts))


def per_microbatch(collate: Callable[[list], Any], num_microbatches: int) -> PerMicrobatch:
    """Return a `collate` for a loader that collates each microbatch of a rank separately.

    Padding is then to the longest row of the microbatch, and random numbers that `collate` draws follow from the seed
    and the microbatch's first row. Both are the same on any number of ranks N if N * `num_microbatches` is the same.

    Args:
        collate: rows -> batch.
        num_microbatches: number of microbatches of a share in the step: `accumulate(num_microbatches)`.

    Raises `DataError` if an argument is not a count or not a function.

    >>> longest = lambda rows: max(map(len, rows))
    >>> per_microbatch(longest, 2)(["a", "abc", "ab", "a"]).parts
    (3, 2)
    """
    if not is_int(num_microbatches, 1):
        raise DataError("not a count", where="num_microbatches", got=repr(num_microbatches), want="an int, 1 or more")
    if not callable(collate):
        raise DataError("collate is not a function", where="collate", got=repr(collate)[:60], want="rows -> batch")
    return PerMicrobatch(collate, num_microbatches)
