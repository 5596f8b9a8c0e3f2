"""The loaders: of each rank's share of every batch, and of any other loader again and again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from fds import random
from fds.data.orders import Ordering, Orders, Stream, check_count, check_sampler, is_batch_order
from fds.data.shares import Coordinate, PerMicrobatch, Shares, Workers, coordinate_on
from fds.errors import DataError, is_int


@attrs.frozen(eq=False)
class DistributedLoader:
    """The batches of a data set from a position on: a value, which can be iterated any number of times.

    Global batch i is a function of the seed, the batch size, `last`, the sampler and the length of the data set only,
    not of the number of ranks or of where a run was resumed. Rank r of N reads rows r * B / N to (r + 1) * B / N of it,
    so the shares concatenated in rank order are the batch. Ranks that differ only along other axes (pipeline, tensor)
    have the same coordinate on `axis` and read the same rows.

    The position is the index of the batch, counted over all epochs, as `state.calls` counts: after `fds.load`,
    `loader.starting(state.calls)` continues where the save was made, also within an epoch.

    Args:
        dataset: has `len` and `[i]`; rows are read by torch's DataLoader.
        batch_size: rows of the global batch of one call of the step, B: all ranks and all microbatches together. Of
            `batches_by_tokens`, which decide how many rows a microbatch has, the number of microbatches of all ranks.
        axis: the data axis of a mesh; None is one rank.
        shuffle: permute the rows, differently in every epoch.
        sampler: gives the row numbers of an epoch instead, as many in every epoch: a torch Sampler, or a function of
            (epoch, key) that returns them. It is called with torch's, Python's and NumPy's generators, and its own
            `generator`, seeded from `seed` and the epoch, after `set_epoch`. Or a `BatchOrder`, which gives the rows of
            each batch: a `CurriculumSampler`, `batches_by_tokens`. A data set that is one, a `mixture`, is its own.
        seed: an int or a key, the same on every rank, for the orders and for random numbers of data set and `collate`.
        last: what to do with the B' < B rows left at the end of an epoch.
            "drop": leave them out, other ones in every epoch.
            "keep": they are a batch of B' rows; `DataError` here if they do not divide among ranks and microbatches.
            "wrap": fill the batch with the first rows of the next epoch, which continues after them: all batches have B
            rows, and over the epochs every row comes equally often. An epoch is then the batches that begin in it.
        num_microbatches: number of microbatches into which the step splits a share; only used to check sizes here.
        collate: rows -> batch; None is torch's `default_collate`. `per_microbatch(collate, n)` collates, and pads, each
            microbatch separately.
        num_workers: processes that read ahead; the batches are bit-equal for any number.
        persistent_workers: keep worker processes between epochs instead of starting them in every epoch.
        prefetch_factor: batches that each worker reads ahead; None is torch's 2.
        pin_memory: return tensors in page-locked memory; no effect without an accelerator.
        start: the position.

    Raises `DataError`.

    >>> loader = DistributedLoader([10, 11, 12, 13, 14], 2, shuffle=False)
    >>> [batch.tolist() for batch in loader]
    [[10, 11], [12, 13]]
    >>> [batch.tolist() for batch in loader.starting(3)]
    [[12, 13]]
    """

    dataset: Any = attrs.field(repr=lambda it: f"{type(it).__name__} of {len(it)}")
    batch_size: int
    axis: Coordinate = attrs.field(default=None, converter=coordinate_on)
    shuffle: bool = attrs.field(default=True, kw_only=True)
    seed: int | Tensor = attrs.field(default=0, kw_only=True)
    last: str = attrs.field(default="drop", kw_only=True)
    num_microbatches: int = attrs.field(default=1, kw_only=True)
    collate: Callable[[list], Any] | None = attrs.field(default=None, kw_only=True)
    num_workers: int = attrs.field(default=0, kw_only=True)
    pin_memory: bool = attrs.field(default=False, kw_only=True)
    start: int = attrs.field(default=0, kw_only=True)
    sampler: Ordering | None = attrs.field(default=None, kw_only=True)
    persistent_workers: bool = attrs.field(default=False, kw_only=True)
    prefetch_factor: int | None = attrs.field(default=None, kw_only=True)
    _workers: Workers | None = attrs.field(init=False, repr=False)  # shared by loaders that differ in `start` only

    def __attrs_post_init__(self) -> None:
        _check_dataset(self.dataset)
        check_sampler(self.sampler)
        key = random.key(self.seed)
        for name, least in (("batch_size", 1), ("num_microbatches", 1), ("num_workers", 0), ("start", 0)):
            check_count(name, getattr(self, name), least)
        if self.prefetch_factor is not None:
            check_count("prefetch_factor", self.prefetch_factor, 1)
        for name in ("persistent_workers", "prefetch_factor"):
            if getattr(self, name) and not self.num_workers:
                raise DataError("there are no workers", where=name, got="num_workers=0", want="num_workers=1 or more")
        object.__setattr__(self, "_workers", self._new_workers(key))
        stream = self.stream
        self._check_divides(self.batch_size, "the batch", "a multiple of it")
        if stream.rest and self.last == "keep":
            self._check_divides(stream.rest, "the last batch of an epoch", 'last="drop" or last="wrap"')

    @property
    def stream(self) -> Stream:
        """The rows of every batch."""
        return self._live_workers().shares.stream

    @property
    def epoch(self) -> int:
        """The epoch that this loader iterates, counted from 0."""
        return self.stream.epoch(self.start)

    def starting(self, at: int | Tensor) -> DistributedLoader:
        """Return the loader that begins at batch `at` of the run: an int, or `state.calls`.

        Raises `DataError` for anything else.
        """
        position = _position(at)
        check_count("start", position, 0)
        self._live_workers()
        other = copy.copy(self)
        object.__setattr__(other, "start", position)
        return other

    def next_epoch(self) -> DistributedLoader:
        """Return the loader of the next epoch, which begins where this one ends."""
        return self.starting(self.stream.end_of_epoch(self.start))

    def __len__(self) -> int:
        """Return the number of batches from `start` to the end of the epoch, one per call of the step.

        DeepSpeed's loader counts microbatches, and always those of a whole epoch.
        """
        return self.stream.end_of_epoch(self.start) - self.start

    def __iter__(self) -> Iterator:
        """Yield this rank's share of each batch from `start` to the end of the epoch."""
        workers = self._live_workers()
        stream = workers.shares.stream
        stop = stream.end_of_epoch(self.start)
        if not self.persistent_workers and stream.batches is None:  # compute orders here once, not in every worker
            for epoch in range(stream.epoch(self.start), (stream.begin(stop) - 1) // stream.used + 1):
                workers.shares.orders.rows_of(epoch, 0, 0)
        return iter(workers.read(range(self.start, stop)))

    def _live_workers(self) -> Workers:
        if self._workers is None:  # the loader was pickled
            object.__setattr__(self, "_workers", self._new_workers(random.key(self.seed)))
        assert self._workers is not None
        return self._workers

    def _new_workers(self, key: Tensor) -> Workers:
        rows, has_order = len(self.dataset), is_batch_order(self.dataset)
        sampler = self.dataset if self.sampler is None and has_order else self.sampler
        orders = Orders(rows, key, self.shuffle, sampler, self.batch_size)
        shares = Shares(
            self.dataset,
            orders.stream(self.last),
            self.axis,
            self.collate or default_collate,
            random.fold_in(key, "draws"),
            orders,
        )
        if isinstance(self.collate, PerMicrobatch) and orders.gives_microbatches(0):
            what, got = "the sampler gives microbatches, each of which is collated by itself", "per_microbatch(...)"
            raise DataError(what, where="collate", got=got, want="the function inside of it")
        return Workers(shares, self.num_workers, self.persistent_workers, self.prefetch_factor, self.pin_memory)

    def _check_divides(self, rows: int, what: str, hint: str) -> None:
        ranks, parts = self.axis.size, self.num_microbatches
        if rows % (ranks * parts) == 0:
            return
        among = f"{ranks} rank{'s' * (ranks > 1)}" + f", {parts} microbatches each" * (parts > 1)
        where, got = "batch_size", f"{rows} rows"
        if rows != self.batch_size:
            where, got = "last", f"{got}: {self.stream.length} in the data set, batch_size={self.batch_size}"
        want = f"a multiple of {ranks * parts}"
        raise DataError(f"{what} does not divide among {among}", where=where, got=got, want=want, hint=hint)


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            "the data set has no random access, so ranks cannot share it by row numbers",
            got=type(dataset).__name__,
            want="a data set with len(dataset) and dataset[i]",
            hint="if it fits into memory: list(dataset)\n"
            "else pass its batches to the step, each rank its own; fds.data.RepeatingLoader repeats them;\n"
            "to resume, skip used batches: itertools.islice(batches, int(state.calls), None)",
        )
    if isinstance(dataset, Mapping):
        got, hint = ", ".join(map(repr, list(dataset)[:4])), "of columns: torch.utils.data.StackDataset(**columns)"
        raise DataError("a dict is not a data set of rows", got=got, want="rows under the numbers from 0", hint=hint)
    try:
        len(dataset)
    except (TypeError, NotImplementedError):
        raise DataError("the data set has no length", got=type(dataset).__name__, want="len(dataset)") from None


def _position(at: Any) -> int:
    if isinstance(at, Tensor):
        if at.shape != () or at.is_floating_point() or at.is_complex() or at.dtype == torch.bool or at.is_meta:
            got = f"{tuple(at.shape)} {at.dtype} on {at.device}"
            raise DataError("not a position", where="starting", got=got, want="an int, or state.calls")
        return int(at)
    if not is_int(at):
        raise DataError("not a position", where="starting", got=repr(at), want="an int, or state.calls")
    return at


_END = object()


class RepeatingLoader:
    """Iterate a loader endlessly; `next(loader)` gives one batch.

    - A `DistributedLoader` continues with its next epoch, in another order.
    - Before every further epoch of a torch DataLoader, `set_epoch` of its sampler (a DistributedSampler, say) is
      called with the next epoch, without which every epoch would have the order of the first.
    - Anything else is iterated again from its beginning.

    Like any iterator it continues where it is: `iter` does not restart it. `loader` is the loader that is iterated.

    Raises `DataError` if an epoch yields nothing, or the loader cannot be iterated.

    >>> batches = RepeatingLoader([1, 2])
    >>> [next(batches) for _ in range(5)]
    [1, 2, 1, 2, 1]
    """

    def __init__(self, loader: Iterable):
        if not hasattr(loader, "__iter__"):
            raise DataError("the loader cannot be iterated", got=type(loader).__name__, want="a loader")
        self.loader: Any = loader
        self._current: Any = None  # created with the first batch, since workers start with it

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        if self._current is not None:
            if (batch := next(self._current, _END)) is not _END:
                return batch
            if isinstance(self.loader, DistributedLoader):
                self.loader = self.loader.next_epoch()
            for sampler in _samplers(self.loader):
                sampler.set_epoch(getattr(sampler, "epoch", 0) + 1)
        self._current = iter(self.loader)
        if (batch := next(self._current, _END)) is not _END:
            return batch
        self._current = None
        got = f"{type(self.loader).__name__} that yields nothing"
        want = "a loader that yields batches each time it is iterated"
        hint = "a generator can be iterated only once: pass an object whose __iter__ makes a new one"
        raise DataError("an epoch without a batch", got=got, want=want, hint=hint)


def _samplers(loader: Any) -> list[Any]:
    """Return the samplers of a torch DataLoader that have `set_epoch`, each once."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
    return list({id(it): it for it in samplers if callable(getattr(it, "set_epoch", None))}.values())
