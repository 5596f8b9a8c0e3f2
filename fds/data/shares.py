"""`Shares`: a data set whose item i is this rank's share of global batch i; torch's DataLoader reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate, get_worker_info

from fds import random
from fds.data.coordinate import Coordinate
from fds.data.orders import Orders
from fds.data.padding import PerMicrobatch
from fds.data.stream import Stream
from fds.errors import DataError


@attrs.frozen(eq=False)
class Shares:
    """Read and collate the share of a batch.

    Random numbers drawn from the global generators of torch, Python and NumPy while a row is read are a function of the
    seed, the epoch and the row, independent of ranks, workers and the position at which a run was resumed; the
    generators are restored afterwards. A data set that reads many rows at once, and `collate`, are seeded once per
    share, by its first row, so their draws depend on the number of ranks. Seeding costs about 10 us a row, half of it
    for Python's generator, and is left out for data sets that cannot draw.
    """

    dataset: Any
    stream: Stream
    coordinate: Coordinate
    collate: Callable[[list], Any]
    key: Tensor
    orders: Orders

    def __getitem__(self, batch: int) -> Any:
        """Return the collated share of a batch. Raises `DataError` if a row or `collate` raises StopIteration."""
        try:
            return self._share(batch)
        except StopIteration as error:  # a DataLoader would take it for the end of the epoch
            raise DataError(
                "a row of the data set, or collate, raised StopIteration, which would end the epoch",
                where=f"batch {batch}",
                got="StopIteration",
                want="dataset[i] to return the row",
                hint="an iterator that next() reads inside it is exhausted",
            ) from error

    def _share(self, batch: int) -> Any:
        begin, end = self.coordinate.share(self.stream.begin(batch), self.stream.begin(batch + 1))
        pieces = list(self.stream.pieces(begin, end))
        if not draws(self.dataset) and self.collate is default_collate:
            return stacked([self.dataset[i] for piece in pieces for i in self.orders.rows_of(*piece)])
        devices = random.in_use() if get_worker_info() is None else []  # a forked worker cannot use a GPU
        with random.scope(devices), random.python_seeded(self.key):
            rows = [row for piece in pieces for row in self._read(*piece, devices)]
            seed = lambda row: _reseed(random.seed(self.key, "collate", begin + row), devices)
            if isinstance(self.collate, PerMicrobatch):
                return self.collate(rows, seed)
            seed(0)
            return stacked(rows) if self.collate is default_collate else self.collate(rows)

    def _read(self, epoch: int, first: int, end: int, devices: list[torch.device]) -> list:
        indices = self.orders.rows_of(epoch, first, end)
        key = random.fold_in(self.key, "epoch", epoch)
        if reads_many(self.dataset):
            _reseed(random.seed(key, "rows", indices[0]), devices)
            return list(self.dataset.__getitems__(indices))
        rows = []
        for position, index in enumerate(indices, first):
            # a sampler may give a row more than once in an epoch, with other draws each time
            _reseed(random.seed(key, "row", index, *(() if self.orders.sampler is None else (position,))), devices)
            rows.append(self.dataset[index])
        return rows


def stacked(rows: list) -> Any:
    """Return rows as a batch, of which torch stacks the tensors. Raises `DataError` for rows that cannot be."""
    try:
        return default_collate(rows)
    except (RuntimeError, TypeError, KeyError) as error:
        raise DataError(
            "the rows of a batch cannot be stacked",
            where="collate",
            got=f"{type(error).__name__}: {error}"[:200],
            want="rows of tensors, numbers and text, alike in keys and shapes",
            hint="collate=f, where f(rows) pads them; fds.data.per_microbatch(f, n) does each microbatch by itself",
        ) from error


def draws(dataset: Any) -> bool:
    """Return whether reading a row may draw random numbers: False for containers in memory."""
    if type(dataset) is Subset:
        return draws(dataset.dataset)
    return type(dataset) not in (list, tuple, range, Tensor, np.ndarray, TensorDataset)


def reads_many(dataset: Any) -> bool:
    """Return whether a data set defines how it reads many rows at once (`__getitems__`)."""
    if type(dataset) is Subset:  # has the method too, but reads row by row
        return reads_many(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def _reseed(number: int, devices: list[torch.device]) -> None:
    random.reseed(number, devices)
    random.reseed_python(number)
