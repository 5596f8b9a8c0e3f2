"""Workers: how the shares of some batches are read, by this process or by others that may stay from epoch to epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch.utils.data import DataLoader

from fds import random
from fds.data.shares import Shares


@attrs.define(eq=False)
class Positions:
    """The numbers of the batches that are to be read: the sampler of a DataLoader."""

    numbers: range

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


@attrs.define(eq=False)
class Workers:
    """What reads the shares of a loader and of those that differ from it in their position only.

    Processes that stay are one torch DataLoader whose sampler is given other batches for every epoch. They read for
    one iteration at a time; a second one that begins meanwhile has processes of its own.
    """

    shares: Shares
    num_workers: int
    persistent: bool
    prefetch_factor: int | None
    pin_memory: bool
    kept: tuple[DataLoader, Positions] | None = None
    busy: bool = False

    def read(self, numbers: range) -> Iterator[Any]:
        """Yield the shares of these batches."""
        if not self.persistent or self.busy:
            return iter(self._loader(Positions(numbers), persistent=False))
        return self._read_by_those_that_stay(numbers)

    def _read_by_those_that_stay(self, numbers: range) -> Iterator[Any]:
        if self.kept is None:
            positions = Positions(numbers)
            self.kept = self._loader(positions, persistent=True), positions
        loader, positions = self.kept
        self.busy, positions.numbers = True, numbers
        try:
            yield from loader
        finally:
            self.busy = False

    def _loader(self, positions: Positions, *, persistent: bool) -> DataLoader:
        return DataLoader(
            self.shares,  # type: ignore[arg-type]  # a map from batch numbers
            batch_size=None, sampler=positions, collate_fn=_as_it_is, num_workers=self.num_workers,
            pin_memory=self.pin_memory and torch.accelerator.is_available(), persistent_workers=persistent,
            prefetch_factor=self.prefetch_factor, generator=random.generator(self.shares.key),
        )  # fmt: skip

    def __reduce__(self) -> tuple:
        return _none, ()  # processes do not travel; a loader that was sent somewhere makes others there


def _none() -> None:
    return None


def _as_it_is(batch: Any) -> Any:
    return batch
