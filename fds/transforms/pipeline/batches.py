"""Batches: whether the ranks of a pipeline were given the same one, as they must."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fds import tree
from fds.errors import BatchError
from fds.step import checksum

Digest = list[int | None] | None  # of inputs and targets; None for what a rank was not given


def digest(batch: Any) -> Digest:
    """Return a checksum of the first rows of inputs and targets; of what lies on a GPU, of the shapes alone.

    Anything but a pair has none: the pipeline refuses it where it is needed.
    """
    if not (tree.is_sequence(batch) and len(batch) == 2):
        return None
    return [None if part is None else checksum(part) for part in batch]


def check_same(digests: Sequence[Digest], num_ranks: int) -> None:
    """Raise `BatchError` where two of the ranks along a pipeline saw different inputs or targets.

    `digests` are those of all ranks, the pipeline's coordinate varying slowest.
    """
    replicas = len(digests) // num_ranks
    for replica in range(replicas):
        ranks = [(rank, digests[rank]) for rank in range(replica, len(digests), replicas)]
        for at, part in enumerate(("inputs", "targets")):
            known = [(rank, sums[at]) for rank, sums in ranks if sums is not None and sums[at] is not None]
            other = next((rank for rank, theirs in known if theirs != known[0][1]), None)
            if other is not None:
                raise BatchError(
                    "ranks along the pipeline were given different batches",
                    where=f"ranks {known[0][0]} and {other}",
                    got=f"other {part}",
                    want="one batch for all ranks that differ only along the pipeline",
                    hint="take rows by the coordinate on the data axis, not by the global rank",
                )
