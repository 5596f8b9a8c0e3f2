"""Together: the ranks that keep one state, and work that succeeds on all of them or fails on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs

from fds.collectives import Axis
from fds.errors import FdsError, StorageError
from fds.step import Step


@attrs.define
class Said:
    """What this rank tells the others at the end of a piece of work, and then what all told, in their order."""

    mine: Any = None  # JSON
    all: list[Any] = attrs.field(factory=list)


@attrs.frozen
class Ranks:
    """The ranks among which a step shares its state, as one of them sees them."""

    data: Axis | None = None  # None for one rank alone
    index: int = 0  # among all of them
    slice: int = 0  # which slice of every bucket it holds
    replica: int = 0  # of ranks with equal slices, which one it is

    @classmethod
    def of(cls, step: Step) -> Ranks:
        """Return the ranks of a step."""
        shard = step.reduce.shard
        if shard is None:
            return cls()
        return cls(shard.data, shard.data.index, shard.axis.index, shard.replicate.index if shard.replicate else 0)

    @contextlib.contextmanager
    def together(self) -> Iterator[Said]:
        """Wait at the end of the block for all ranks to come to the end of theirs, and exchange what they say.

        Inside it a rank must not call a collective. Raises `StorageError` on every rank where the block of any rank
        raised, naming the rank; on one rank alone, what it raised.
        """
        said, error = Said(), None
        if self.data is None:
            yield said
            said.all = [said.mine]
            return
        try:
            yield said
        except BaseException as caught:
            error = caught
        heard = self.data.exchange([said.mine if error is None else None, None if error is None else _fields(error)])
        if error is not None and not isinstance(error, Exception):
            raise error  # a key was pressed: the others know
        failed = {rank: fields for rank, (_, fields) in zip(self.data.ranks, heard, strict=True) if fields}
        if failed:
            rank, (what, where, got, want, hint) = next(iter(failed.items()))
            raise StorageError(f"rank {rank}: {what}", where=where, got=got, want=want, hint=hint) from error
        said.all = [value for value, _ in heard]

    def refuse_different(self, told: list[dict[str, str]]) -> None:
        """Raise `StorageError`, on every rank, for the first thing that a rank said and rank 0 did not."""
        for i, theirs in enumerate(told):
            for what, value in theirs.items():
                if value != told[0][what]:
                    assert self.data is not None
                    raise StorageError(
                        f"the ranks do not agree on the {what}", where=f"rank {self.data.ranks[i]}", got=value[:200],
                        want=f"{told[0][what]:.200}, as rank {self.data.ranks[0]} has it",
                    )  # fmt: skip


def _fields(error: BaseException) -> list[str]:
    if isinstance(error, FdsError):
        return [error.what, error.where, error.got, error.want, error.hint]
    return [f"{type(error).__name__}: {error}"[:1000], "", "", "", ""]
