"""What a rank reads of a batch: its share of the rows, collated, in this process or in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate, get_worker_info

from fds import random
from fds.collectives import Axis
from fds.data.mixtures import Mixture
from fds.data.orders import Orders, Stream, check_count
from fds.errors import DataError
from fds.microbatches import Microbatches


@attrs.frozen
class Coordinate:
    """A rank's position among those that share a batch."""

    index: int = 0
    size: int = 1

    def share(self, begin: int, end: int) -> tuple[int, int]:
        """Return this rank's part of the rows from `begin` to `end`: contiguous, in rank order.

        >>> Coordinate(index=1, size=4).share(100, 108)
        (102, 104)
        """
        part = (end - begin) // self.size
        return begin + self.index * part, begin + (self.index + 1) * part


def coordinate_on(axis: Any) -> Coordinate:
    """Return the coordinate of this rank on an axis; None is an axis of one rank.

    Raises `DataError` if this is not an axis, and `MeshError` for an axis of a mesh over other ranks.
    """
    if axis is None:
        return Coordinate()
    if isinstance(axis, Axis):
        axis.check_current()
        return Coordinate(axis.index, axis.size)
    if isinstance(axis, Coordinate) and 0 <= axis.index < axis.size:
        return axis
    want = "an axis of a mesh, a Coordinate with index < size, or None"
    hint = 'the axis of data ranks: fds.mesh(dp=-1)["dp"]'
    raise DataError("not an axis", where="axis", got=repr(axis), want=want, hint=hint)


@attrs.frozen
class PerMicrobatch:
    """A `collate` of a loader that returns `Microbatches`: see `per_microbatch`."""

    collate: Callable[[list], Any]
    num_microbatches: int

    def __call__(self, rows: list, seed: Callable[[int], None] = lambda row: None) -> Microbatches:
        """Return the collated microbatches of a share; `seed` is called with the index of each one's first row."""
        size, rest = divmod(len(rows), self.num_microbatches)
        if rest or not size:
            where, got, want = "collate", f"{len(rows)} rows", f"a positive multiple of {self.num_microbatches}"
            raise DataError(
                f"the share does not divide into {self.num_microbatches} microbatches", where=where, got=got, want=want
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
    check_count("num_microbatches", num_microbatches, 1)
    if not callable(collate):
        raise DataError("collate is not a function", where="collate", got=repr(collate)[:60], want="rows -> batch")
    return PerMicrobatch(collate, num_microbatches)


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
        devices = random.in_use() if get_worker_info() is None else []  # a forked worker cannot use a GPU
        if self.orders.gives_microbatches(batch):
            parts = self.orders.microbatches_of(*pieces[0])
            with random.scope(devices), random.python_seeded(self.key):
                return Microbatches(tuple(self._microbatch(batch, i, x, devices) for i, x in enumerate(parts, begin)))
        if not draws(self.dataset) and self.collate is default_collate:
            return stacked([self.dataset[i] for piece in pieces for i in self.orders.rows_of(*piece)])
        with random.scope(devices), random.python_seeded(self.key):
            rows = [row for piece in pieces for row in self._piece(*piece, devices)]
            seed = lambda row: _reseed(random.seed(self.key, "collate", begin + row), devices)
            if isinstance(self.collate, PerMicrobatch):
                return self.collate(rows, seed)
            seed(0)
            return self._collated(rows)

    def _collated(self, rows: list) -> Any:
        return stacked(rows) if self.collate is default_collate else self.collate(rows)

    def _microbatch(self, batch: int, number: int, indices: list[int], devices: list[torch.device]) -> Any:
        """Return the rows of a microbatch, collated; `number` counts the microbatches of all batches."""
        key = random.fold_in(self.key, "epoch", batch, "microbatch", number)
        rows = self._read(key, indices, 0, devices)
        _reseed(random.seed(self.key, "collate", number), devices)
        return self._collated(rows)

    def _piece(self, epoch: int, first: int, end: int, devices: list[torch.device]) -> list:
        key = random.fold_in(self.key, "epoch", epoch)
        return self._read(key, self.orders.rows_of(epoch, first, end), first, devices)

    def _read(self, key: Tensor, indices: list[int], first: int, devices: list[torch.device]) -> list:
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
    """Return whether reading a row may draw random numbers: False in memory, and with `draws = False`."""
    if type(dataset) is Subset:
        return draws(dataset.dataset)
    if type(dataset) is Mixture:
        return any(map(draws, dataset.datasets))
    in_memory = list, tuple, range, Tensor, np.ndarray, TensorDataset
    return random.draws(dataset) and type(dataset) not in in_memory


def reads_many(dataset: Any) -> bool:
    """Return whether a data set defines how it reads many rows at once (`__getitems__`)."""
    if type(dataset) is Subset:  # has the method too, but reads row by row
        return reads_many(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def _reseed(number: int, devices: list[torch.device]) -> None:
    random.reseed(number, devices)
    random.reseed_python(number)


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
        return type(None), ()  # processes cannot be pickled; an unpickled loader starts its own


def _identity(batch: Any) -> Any:
    return batch
