"""Which rows a batch has: the order of the rows in each epoch, and the epochs cut into batches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler

from fds import random
from fds.errors import DataError, did_you_mean

Ordering = Sampler | Callable[[int, Tensor], Sequence[int] | Tensor | np.ndarray]


@attrs.frozen(eq=False)
class Orders:
    """The orders of all epochs, computed on demand; the last two are cached."""

    rows: int  # number of rows of the data set
    key: Tensor  # the key of the seed
    shuffle: bool
    # gives the rows of an epoch; None is a permutation of all rows, or without `shuffle` their own order
    sampler: Ordering | None = None
    cache: dict[int, np.ndarray] = attrs.field(factory=dict, repr=False)
    lengths: list[int] = attrs.field(factory=list, repr=False)  # the length of a sampler's epochs, once known

    def length(self) -> int:
        """Return the number of rows in an epoch. Raises `DataError` if the sampler gives no row numbers."""
        if self.sampler is None:
            return self.rows
        if not self.lengths:
            self._of(0)
        return self.lengths[0]

    def rows_of(self, epoch: int, first: int, end: int) -> list[int]:
        """Return the row numbers at positions `first` to `end` of an epoch."""
        if self.sampler is None and not self.shuffle:
            return list(range(first, end))
        return self._of(epoch)[first:end].tolist()

    def _of(self, epoch: int) -> np.ndarray:
        if epoch not in self.cache:
            key = random.fold_in(self.key, "order", epoch)
            order = permutation(key, self.rows) if self.sampler is None else self._from_sampler(epoch, key)
            for old in list(self.cache)[:-1]:
                del self.cache[old]
            self.cache[epoch] = order
        return self.cache[epoch]

    def _from_sampler(self, epoch: int, key: Tensor) -> np.ndarray:
        """Return the sampler's row numbers in an epoch, `(N,) int64`."""
        with random.seeded(key), random.python_seeded(key):
            if isinstance(self.sampler, Sampler):
                if callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
                    set_epoch(epoch)
                if isinstance(generator := getattr(self.sampler, "generator", None), torch.Generator):
                    generator.manual_seed(random.seed(key, "generator"))
                result: Any = list(self.sampler)
            else:
                assert self.sampler is not None
                result = self.sampler(epoch, key)
        where = f"sampler, epoch {epoch}"
        try:
            order = np.asarray(result)
        except (ValueError, TypeError):
            order = np.asarray("lists")
        if order.ndim != 1 or not len(order) or order.dtype.kind not in "iu":
            raise DataError(
                "the sampler did not give a sequence of row numbers",
                where=where,
                got=f"{type(result).__name__} {str(result)[:40]}",
                want="integers, one or more",
                hint="batch_size forms the batches: pass a sampler of rows, not of batches",
            )
        if order.min() < 0 or order.max() >= self.rows:
            got, want = str(order.min() if order.min() < 0 else order.max()), f"0 to {self.rows - 1}"
            raise DataError("the sampler gave a row that the data set does not have", where=where, got=got, want=want)
        if not self.lengths:
            self.lengths.append(len(order))
        if len(order) != self.lengths[0]:
            got, want = f"{len(order)} rows", f"{self.lengths[0]} rows in every epoch"
            raise DataError("the epochs of the sampler differ in length", where=where, got=got, want=want)
        return order.astype(np.int64)


def check_sampler(sampler: Any) -> None:
    """Raise `DataError` unless this is a sampler of the rows of all ranks, or None."""
    if isinstance(sampler, DistributedSampler):
        raise DataError(
            "a DistributedSampler selects a rank's share, which the loader does itself",
            where="sampler",
            got="DistributedSampler",
            want="a sampler of all ranks' rows",
            hint="leave it out: axis= selects the share",
        )
    if sampler is None or isinstance(sampler, Sampler):
        return
    hint = ""
    try:
        if callable(sampler) and not isinstance(sampler, type):
            inspect.signature(sampler).bind("epoch", "key")
            return
    except TypeError as error:
        hint = f"it is called with an epoch and a key: {error}"
    except ValueError:  # functions not written in Python may have no signature
        return
    want = "a torch Sampler, or a function of (epoch, key) that returns the numbers of rows"
    raise DataError("not a sampler", where="sampler", got=repr(sampler)[:60], want=want, hint=hint)


def permutation(key: Tensor, length: int) -> np.ndarray:
    """Return the numbers from 0 to length - 1, `(length,) int64`, in an order that is a function of the key.

    Every row gets a random number whose low bits are replaced by its index, and the numbers are sorted: no two are
    equal, so all sorting algorithms agree. (Two of a million rows get equal random bits, and so keep their order, with
    probability 2^-44.) `torch.randperm` takes about as long, but its order may change between versions, and a run
    resumed with another version would repeat some rows and lose others. 8 bytes a row; 23 ms for a million rows.

    Source: Philox-4x64-10, Salmon et al. 2011, doi:10.1145/2063384.2063405; NumPy keeps its stream (NEP 19).

    >>> from fds import random
    >>> permutation(random.key(0), 6).tolist()
    [2, 4, 0, 3, 5, 1]
    """
    low = (1 << max(length - 1, 0).bit_length()) - 1
    numbers = np.random.Philox(key=key.numpy().view(np.uint64)).random_raw(length)
    numbers &= np.uint64(2**64 - 1 - low)
    numbers |= np.arange(length, dtype=np.uint64)
    numbers.sort()
    numbers &= np.uint64(low)
    return numbers.view(np.int64)


LAST = ("drop", "keep", "wrap")


@attrs.frozen
class Stream:
    """The rows of all epochs, concatenated and cut into batches.

    A row of the stream is an integer: `epoch * used + position in the epoch`. Batch i ends where batch i + 1 begins.
    """

    length: int  # rows of the data set
    batch_size: int  # rows of a whole batch
    last: str  # what to do with the rows left at the end of an epoch: one of LAST

    def __attrs_post_init__(self) -> None:
        if self.last not in LAST:
            want, hint = " or ".join(map(repr, LAST)), did_you_mean(str(self.last), LAST)
            raise DataError("unknown way to end an epoch", where="last", got=repr(self.last), want=want, hint=hint)
        if not self.used:
            got = f"{self.length} rows, batch_size={self.batch_size}"
            want = "at least one batch" if self.length else "at least one row"
            hint = 'a smaller batch_size, or last="keep" or "wrap"' if self.length else ""
            raise DataError("the data set does not fill one batch", got=got, want=want, hint=hint)

    @property
    def rest(self) -> int:
        """Number of rows left over after the full batches of an epoch."""
        return self.length % self.batch_size

    @property
    def used(self) -> int:
        """Number of rows of an epoch that are in the stream."""
        return self.length - (self.rest if self.last == "drop" else 0)

    def begin(self, batch: int) -> int:
        """Return the first row of a batch, which is where the one before it ends."""
        if self.last != "keep":
            return batch * self.batch_size
        epoch, number = divmod(batch, -(-self.length // self.batch_size))
        return epoch * self.length + number * self.batch_size

    def epoch(self, batch: int) -> int:
        """Return the epoch in which a batch begins."""
        return self.begin(batch) // self.used

    def end_of_epoch(self, batch: int) -> int:
        """Return the number of the first batch that begins in a later epoch than this one."""
        epochs = self.epoch(batch) + 1
        if self.last == "keep":
            return epochs * -(-self.length // self.batch_size)
        return -(-epochs * self.used // self.batch_size)

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Split rows of the stream at the ends of epochs: yield (epoch, first, end), counted within the epoch.

        >>> list(Stream(10, 4, "wrap").pieces(8, 12))
        [(0, 8, 10), (1, 0, 2)]
        """
        while begin < end:
            epoch, first = divmod(begin, self.used)
            count = min(end - begin, self.used - first)
            yield epoch, first, first + count
            begin += count
