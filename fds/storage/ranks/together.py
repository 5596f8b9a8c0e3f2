"""Together: the ranks that keep one state, and work that succeeds on all of them or fails on all of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import attrs

from fds.collectives import Axis
from fds.errors import FdsError, RankError, StorageError
from fds.step import Step
from fds.storage.disk.paths import reading


@attrs.define
class Said:
    """What this rank tells the others at the end of a piece of work, and then what all told, in their order."""

    mine: Any = None  # JSON
    all: list[Any] = attrs.field(factory=list)


@attrs.frozen
class Ranks:
    """The ranks among which a step shares its state, as one of them sees them."""

    everyone: Axis | None = None  # None for one rank alone
    doing: str = ""  # what they have come together for, to compare
    index: int = 0  # among all of them
    pipelined: bool = False  # whether they hold the leaves of different stages
    place: int = 0  # in the pipeline: which stages it holds
    data: int = 0  # among the ranks at its place
    num_data: int = 1
    slice: int = 0  # which slice of every bucket it holds
    replica: int = 0  # of ranks with equal slices, which one it is
    num_replicas: int = 1

    @classmethod
    def of(cls, step: Step, doing: str) -> Ranks:
        """Return the ranks of a step, which come together to do this. Raises `StorageError` for what is no step."""
        if not hasattr(step, "everyone"):
            raise StorageError(f"{doing}: this is no step", where="step", got=type(step).__name__, want="a Step",
                               hint="fds.save(dir, state, step), fds.load(dir, step, params)")  # fmt: skip
        dims = step.dimensions
        if dims.everyone is None:
            return cls()
        return cls(dims.everyone, doing, dims.everyone.index, bool(dims.owned), dims.place, *dims.share_of_batch,
                   dims.slice, *dims.copy)  # fmt: skip

    @property
    def size(self) -> int:
        """How many ranks share the state."""
        return 1 if self.everyone is None else self.everyone.size

    @property
    def timeout(self) -> float:
        """How many seconds a rank waits for another."""
        return math.inf if self.everyone is None else self.everyone.timeout

    @contextlib.contextmanager
    def together(self) -> Iterator[Said]:
        """Wait at the end of the block for all ranks to come to the end of theirs, and exchange what they say.

        Inside it a rank must not call a collective. What the file system refuses is a `StorageError`.

        Raises `StorageError` on every rank where the block of any rank raised, naming the rank; on one rank alone, what
        it raised. A `RankError` is raised at once: who does not answer does not hear of it either.
        """
        said, error = Said(), None
        if self.everyone is None:
            with reading(self.doing):
                yield said
            said.all = [said.mine]
            return
        try:
            with reading(self.doing):
                yield said
        except RankError:
            raise
        except BaseException as caught:
            error = caught
        mine = [said.mine, None] if error is None else [None, fields(error)]
        heard = self.everyone.exchange(mine, self.doing)
        if error is not None and not isinstance(error, Exception):
            raise error  # a key was pressed: the others know
        failed = {rank: fields for rank, (_, fields) in zip(self.everyone.ranks, heard, strict=True) if fields}
        if failed:
            rank, (what, where, got, want, hint) = next(iter(failed.items()))
            raise StorageError(f"rank {rank}: {what}", where=where, got=got, want=want, hint=hint) from error
        said.all = [value for value, _ in heard]

    def refuse_different(self, told: list[dict[str, str]]) -> None:
        """Raise `StorageError`, on every rank, for the first thing of which a rank said another than one before it."""
        said: dict[str, tuple[str, int]] = {}
        for i, theirs in enumerate(told):
            for what, value in theirs.items():
                want, first = said.setdefault(what, (value, i))
                if value != want:
                    assert self.everyone is not None
                    raise StorageError(
                        f"the ranks do not agree on the {what}", where=f"rank {self.everyone.ranks[i]}",
                        got=value[:200], want=f"{want:.200}, as rank {self.everyone.ranks[first]} has it",
                    )  # fmt: skip


def fields(error: BaseException) -> list[str]:
    """Return what an error says, as JSON."""
    if isinstance(error, FdsError):
        return [error.what, error.where, error.got, error.want, error.hint]
    return [f"{type(error).__name__}: {error}"[:1000], "", "", "", ""]
