"""The ranks that share a state, and blocks of work that succeed on all of them or fail on all of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from fds.collectives import Axis
from fds.errors import FdsError, RankError, StorageError
from fds.step import Dimensions, Step
from fds.storage.disk.files import read_errors, refusal


@attrs.define
class Exchange:
    """The value that this rank sends to the others at the end of a block, and then those of all ranks, in order."""

    mine: Any = None  # JSON
    all: list[Any] = attrs.field(factory=list)


@attrs.frozen
class Ranks:
    """The ranks that share a step's state, from the point of view of one of them."""

    everyone: Axis | None = None  # None for a single rank
    doing: str = ""  # the public function that they all call, for errors
    index: int = 0  # of this rank
    dimensions: Dimensions = Dimensions()  # how what they hold lies along the axes that they share
    mirrors: frozenset[str] = frozenset()  # slots that lie as the parameters do
    partial: frozenset[str] = frozenset()  # slots of which every rank has a term of a sum
    agrees: Callable[[str], bool] = lambda slot: False  # whether versions of parameters share a slot of the optimizer

    @classmethod
    def of(cls, step: Step, doing: str) -> Ranks:
        """Return the ranks of a step, for the function named `doing`. Raises `StorageError` for another object."""
        if not hasattr(step, "everyone"):
            hint = "fds.save(dir, state, step), fds.load(dir, step, params)"
            raise refusal(f"{doing}: this is not a step", "step", type(step).__name__, "a Step", hint)
        dims = step.dimensions
        partial = frozenset(slot for slot, memory in step.memory.items() if memory.lies == "partial")
        if dims.everyone is None:
            return cls(partial=partial)
        step.runtime.end_all()
        mirrors = frozenset(name for name, memory in step.memory.items() if memory.mirrors)
        ranks = cls(dims.everyone, doing, dims.everyone.index, dims, mirrors, partial)
        return ranks if step.synchronize is None else attrs.evolve(ranks, agrees=step.synchronize.agrees)

    @property
    def apart(self) -> bool:
        """Whether ranks hold different leaves of the plain state."""
        return bool(self.dimensions.owned) or self.dimensions.local is not None

    @property
    def place(self) -> int:
        """Which of the different sets of leaves this rank holds."""
        return self.dimensions.place

    @property
    def size(self) -> int:
        """The number of ranks that share the state."""
        return 1 if self.everyone is None else self.everyone.size

    @property
    def timeout(self) -> float:
        """The seconds that a rank waits for another."""
        return math.inf if self.everyone is None else self.everyone.timeout

    @contextlib.contextmanager
    def together(self) -> Iterator[Exchange]:
        """Run a block on every rank; at its end, wait for all ranks and exchange the values of `mine`.

        The block must not call a collective. Errors of the file system in it become `StorageError`s.

        If the block of any rank raised, raises a `StorageError` that names the rank, on every rank; a single rank
        raises its own error. A `RankError` is raised at once: the missing rank could not be informed.
        """
        exchange, error = Exchange(), None
        if self.everyone is None:
            with read_errors(self.doing):
                yield exchange
            exchange.all = [exchange.mine]
            return
        try:
            with read_errors(self.doing):
                yield exchange
        except RankError:
            raise
        except BaseException as caught:
            error = caught
        sent = [exchange.mine, None] if error is None else [None, _fields(error)]
        replies = self.everyone.exchange(sent, self.doing)
        if error is not None and not isinstance(error, Exception):
            raise error  # Ctrl-C: the others have been informed
        failed = {rank: fields for rank, (_, fields) in zip(self.everyone.ranks, replies, strict=True) if fields}
        if failed:
            rank, (what, where, got, want, hint) = next(iter(failed.items()))
            raise StorageError(f"rank {rank}: {what}", where=where, got=got, want=want, hint=hint) from error
        exchange.all = [value for value, _ in replies]

    def check_equal(self, texts: list[dict[str, str]]) -> None:
        """Raise `StorageError`, on every rank, for the first name under which two ranks have different texts."""
        seen: dict[str, tuple[str, int]] = {}
        for i, theirs in enumerate(texts):
            for what, value in theirs.items():
                want, first = seen.setdefault(what, (value, i))
                if value != want:
                    assert self.everyone is not None
                    raise StorageError(
                        f"the ranks do not agree on the {what}",
                        where=f"rank {self.everyone.ranks[i]}",
                        got=value[:200],
                        want=f"{want:.200}, as rank {self.everyone.ranks[first]} has it",
                    )


def _fields(error: BaseException) -> list[str]:
    if isinstance(error, FdsError):
        return [error.what, error.where, error.got, error.want, error.hint]
    return [f"{type(error).__name__}: {error}"[:1000], "", "", "", ""]
