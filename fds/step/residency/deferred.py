"""Errors of a residency on one of several ranks, put off until all hear: who raised alone would be waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Axis
from fds.errors import DiskError
from fds.step.residency.contract import Residency, Resident, Slice, text_of, waiting
from fds.step.structure import Structure


@attrs.frozen(eq=False)
class Deferred:
    """A residency in one call of all ranks. Once it failed it reads zeros, and writes nothing, of a call that fails."""

    residency: Residency
    failed: list[Exception] = tree.new(list)

    @property
    def kinds(self) -> Collection[str]:
        """The kinds of which some leaves live there."""
        return self.residency.kinds

    @property
    def updates_on(self) -> str:
        """Where chunks with leaves that live there are updated."""
        return self.residency.updates_on

    def holds(self, leaf: Resident) -> bool:
        """Say whether a leaf lives there."""
        return self.residency.holds(leaf)

    def medium(self, leaf: Resident) -> str:
        """Return where a leaf lives, in a word."""
        return self.residency.medium(leaf)

    def chunks(self, structure: Structure) -> Sequence[Sequence[Slice]]:
        """Return which slices are visited together."""
        return self.residency.chunks(structure)

    def make(self, x: Tensor, leaf: Resident) -> Tensor:
        """Return memory for a leaf; what this raises is not put off."""
        return self.residency.make(x, leaf)

    def read(self, old: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Begin to read; return the function that waits."""
        begun = self._tried(lambda: waiting(self.residency, "read", self.residency.read(old, device)))

        def wait() -> list[Tensor]:
            found = None if begun is None else self._tried(begun)
            return [torch.zeros(x.shape, dtype=x.dtype, device=device) for x in old] if found is None else found

        return wait

    def write(self, worked: list[Tensor], new: list[Tensor]) -> Callable[[], Any]:
        """Begin to write; return the function that waits."""
        begin = lambda: waiting(self.residency, "write", self.residency.write(worked, new))
        begun = None if self.failed else self._tried(begin)
        return lambda: None if begun is None else self._tried(begun)

    def _tried(self, call: Callable[[], Any]) -> Any:
        """Return what a function returns; None where it raises, which is kept."""
        try:
            return call()
        except Exception as error:
            self.failed.append(error)
            return None

    def __repr__(self) -> str:
        return text_of(self.residency)


def deferred(residency: Residency, everyone: Axis | None) -> Residency:
    """Return a residency whose errors `hear` raises, for a call of the ranks that share a step; of one rank itself."""
    return residency if everyone is None or not residency.kinds else Deferred(residency)


def hear(residency: Residency, everyone: Axis | None) -> None:
    """Raise on all ranks what failed on one, of a residency that `deferred` returned.

    The rank raises the error that it had, the others `DiskError`.
    """
    if everyone is None or not isinstance(residency, Deferred):
        return
    failed, what = residency.failed, "what lives elsewhere"
    if not any(count for (count,) in everyone.exchange_numbers([len(failed)], what)):
        return
    texts = everyone.exchange(f"{type(failed[0]).__name__}: {failed[0]}" if failed else None, what)
    if failed:
        raise failed[0]
    for rank, text in enumerate(texts):
        if text is not None:
            raise DiskError(
                "another rank could not read or write what lives elsewhere",
                where=f"rank {rank} of {everyone.name}",
                got=text,
                want="all ranks to end the call",
            )


@contextlib.contextmanager
def heard(residency: Residency, everyone: Axis | None) -> Generator[None]:
    """Run inside what meets no other ranks, and `hear` what it raises too."""
    try:
        yield
    except Exception as error:
        if not isinstance(residency, Deferred):
            raise
        residency.failed.append(error)
    hear(residency, everyone)
