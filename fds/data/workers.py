"""`Workers`: read the shares of batches, in this process or in worker processes that may persist between epochs."""

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
    """The indices of the batches to read: the sampler of a DataLoader."""

    numbers: range

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


@attrs.define(eq=False)
class Workers:
    """Reads the shares of a loader, and of loaders that differ from it only in their position.

    Persistent workers belong to one torch DataLoader, whose sampler gets other batches for every epoch. They serve one
    iteration at a time; a second one that begins meanwhile starts its own processes.
    """

    shares: Shares
    num_workers: int
    persistent: bool
    prefetch_factor: int | None
    pin_memory: bool
    persistent_loader: tuple[DataLoader, Positions] | None = None
    busy: bool = False

    def read(self, numbers: range) -> Iterator[Any]:
        """Yield the shares of these batches."""
        if not self.persistent or self.busy:
            return iter(self._loader(Positions(numbers), persistent=False))
        return self._read_persistent(numbers)

    def _read_persistent(self, numbers: range) -> Iterator[Any]:
        if self.persistent_loader is None:
            positions = Positions(numbers)
            self.persistent_loader = self._loader(positions, persistent=True), positions
        loader, positions = self.persistent_loader
        self.busy, positions.numbers = True, numbers
        try:
            yield from loader
        finally:
            self.busy = False

    def _loader(self, positions: Positions, *, persistent: bool) -> DataLoader:
        return DataLoader(
            self.shares,  # type: ignore[arg-type]  # a mapping from batch indices
            batch_size=None,
            sampler=positions,
            collate_fn=_identity,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory and torch.accelerator.is_available(),
            persistent_workers=persistent,
            prefetch_factor=self.prefetch_factor,
            generator=random.generator(self.shares.key),
        )

    def __reduce__(self) -> tuple:
        return _none, ()  # processes cannot be pickled; an unpickled loader starts its own


def _none() -> None:
    return None


def _identity(batch: Any) -> Any:
    return batch
