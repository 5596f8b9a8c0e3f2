"""Which rows a batch has: the order of the rows in each epoch, and the epochs cut into batches.

A sampler gives the rows of an epoch, which are cut into batches, or those of each batch (`BatchOrder`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler

from fds import random
from fds.errors import DataError, did_you_mean, is_int


@runtime_checkable
class BatchOrder(Protocol):
    """A sampler of whole batches: which rows batch i has is a function of i, without those before it."""

    def rows(self, batch: int, size: int) -> np.ndarray | Sequence[np.ndarray]:
        """Return the row numbers of a batch of `size` rows, `(size,) int64`, or of each of so many microbatches."""
        ...

    def num_batches(self, size: int) -> int:
        """Return the number of batches in an epoch."""
        ...


Ordering = Sampler | Callable[[int, Tensor], Sequence[int] | Tensor | np.ndarray] | BatchOrder


@attrs.frozen(eq=False)
class Orders:
    """The orders of all epochs, computed on demand; the last two are cached."""

    rows: int  # number of rows of the data set
    key: Tensor  # the key of the seed
    shuffle: bool
    # gives the rows of an epoch; None is a permutation of all rows, or without `shuffle` their own order
    sampler: Ordering | None = None
    batch_size: int = 0  # of a `BatchOrder`, of which each batch counts as an epoch here
    cache: dict[int, np.ndarray | list[np.ndarray]] = attrs.field(factory=dict, repr=False)
    lengths: list[int] = attrs.field(factory=list, repr=False)  # the length of a sampler's epochs, once known

    def stream(self, last: str) -> Stream:
        """Return the stream of batches of `batch_size` rows. Raises `DataError`."""
        if not is_batch_order(self.sampler):
            return Stream(self.length(), self.batch_size, last)
        theirs = getattr(self.sampler, "num_samples", self.rows)
        if theirs != self.rows:
            got, want = f"{theirs} samples", f"{self.rows}, as the data set has"
            raise DataError("the sampler is of another data set", where="sampler", got=got, want=want)
        number = self.sampler.num_batches(self.batch_size)
        self._of(0)  # refuses at once what is no batch
        return Stream(self.batch_size, self.batch_size, last, max(number, 1))

    def gives_microbatches(self, batch: int) -> bool:
        """Return whether a batch is some microbatches, each of rows of its own."""
        return is_batch_order(self.sampler) and isinstance(self._of(batch), list)

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
        order = self._of(epoch)
        assert isinstance(order, np.ndarray)
        return order[first:end].tolist()

    def microbatches_of(self, batch: int, first: int, end: int) -> list[list[int]]:
        """Return the row numbers of each of the microbatches `first` to `end` of a batch."""
        return [rows.tolist() for rows in self._of(batch)[first:end]]

    def _of(self, epoch: int) -> np.ndarray | list[np.ndarray]:
        if epoch not in self.cache:
            order: np.ndarray | list[np.ndarray]
            if is_batch_order(self.sampler):
                order = self._from_batch_order(self.sampler, epoch)
            else:
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
                assert callable(self.sampler)
                result = self.sampler(epoch, key)
        where = f"sampler, epoch {epoch}"
        order = self._checked(result, where)
        if not self.lengths:
            self.lengths.append(len(order))
        if len(order) != self.lengths[0]:
            got, want = f"{len(order)} rows", f"{self.lengths[0]} rows in every epoch"
            raise DataError("the epochs of the sampler differ in length", where=where, got=got, want=want)
        return order

    def _from_batch_order(self, sampler: BatchOrder, batch: int) -> np.ndarray | list[np.ndarray]:
        result, where = sampler.rows(batch, self.batch_size), f"sampler, batch {batch}"
        in_parts = isinstance(result, list | tuple) and len(result) > 0 and np.ndim(result[0]) == 1
        order = [self._checked(part, where) for part in result] if in_parts else self._checked(result, where)
        if len(order) != self.batch_size:
            got, want = f"{len(order)}", f"{self.batch_size}, the batch size of the loader"
            raise DataError("the sampler gave a batch of another size", where=where, got=got, want=want)
        return order

    def _checked(self, result: Any, where: str) -> np.ndarray:
        """Return row numbers that a sampler gave, `(N,) int64`. Raises `DataError`."""
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
        return order.astype(np.int64)


def is_batch_order(sampler: Any) -> TypeGuard[BatchOrder]:
    """Return whether a sampler, or a data set that has an order, gives the rows of each batch."""
    return not isinstance(sampler, type) and isinstance(sampler, BatchOrder)


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
    if sampler is None or isinstance(sampler, Sampler) or is_batch_order(sampler):
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


# Rounds of the network. 4 look random where halves are long (Luby and Rackoff 1988). Orders of 7 rows have halves of 1
# and 2 bits: chi-squared over all 5,040 is 600 standard deviations too large with 8 rounds, 14 with 16, none with 24.
_ROUNDS, _ROUNDS_OF_FEW, _FEW = 8, 24, 1 << 12


def permute(key: Tensor, length: int, positions: np.ndarray) -> np.ndarray:
    """Return the rows at some positions of a shuffled order of `length` rows, int64, without making the order.

    No memory, and a time that depends on the number of positions alone: 0.25 us each. Another order than
    `permutation`'s.

    Args:
        key: a key of `fds.random.key`: each has an order of its own.
        length: number of rows, 1 to 2^62.
        positions: integers from 0 to length - 1, of any shape.

    Raises `DataError`.

    Source: a Feistel network, walked until it ends inside of the length: Black and Rogaway 2002,
    doi:10.1007/3-540-45760-7_9; rounds are the finalizer of MurmurHash3.

    >>> from fds import random
    >>> permute(random.key(0), 6, np.arange(6)).tolist()
    [0, 3, 2, 1, 5, 4]
    """
    where, positions = "permute", np.asarray(positions)
    if not is_int(length, 1) or length > 1 << 62:
        raise DataError("not a number of rows", where=where, got=repr(length)[:40], want="an int, 1 to 2^62")
    if positions.size and (positions.dtype.kind not in "iu" or positions.min() < 0 or positions.max() >= length):
        got = f"{positions.dtype} {positions.ravel()[:4].tolist()}"
        raise DataError("not positions in the order", where=where, got=got, want=f"integers, 0 to {length - 1}")
    words = key_words(random.key(key))
    flat = positions.astype(np.int64).ravel()
    return permute_each(np.broadcast_to(words, flat.shape), np.broadcast_to(length, flat.shape), flat).reshape(
        positions.shape
    )


def key_words(key: Tensor, *numbers: np.ndarray) -> np.ndarray:
    """Return 64 bits for each tuple of numbers, uint64, folded into a key: what `fold_in` is, for many at once."""
    word = np.asarray(np.uint64(random.seed(key, "word")))[None]
    for number in numbers:
        word = _mixed(word ^ _mixed(np.asarray(number).astype(np.uint64) + np.uint64(_GOLDEN)))
    return word


def permute_each(words: np.ndarray, lengths: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return `permute` of each position, `(N,) int64`, in the order that its word (`key_words`) and its length have."""
    out = np.empty(len(positions), np.int64)
    few = lengths < _FEW
    for which, rounds in ((np.flatnonzero(few), _ROUNDS_OF_FEW), (np.flatnonzero(~few), _ROUNDS)):
        if len(which):
            out[which] = _through_network(words[which], lengths[which], positions[which], rounds)
    return out


def _through_network(words: np.ndarray, lengths: np.ndarray, positions: np.ndarray, rounds: int) -> np.ndarray:
    last = lengths - 1
    bits = np.frexp(last.astype(np.float64))[1].astype(np.int64)  # one too many where rounding reached a power of two
    halves = np.stack([bits - bits // 2, bits // 2]).astype(np.uint64)  # of the high half and of the low one
    keys = _mixed(words + np.arange(1, rounds + 1, dtype=np.uint64)[:, None] * np.uint64(_GOLDEN))
    out, ends = positions.astype(np.uint64), lengths.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        (high, low), value = halves[:, walking], out[walking]
        left, right = value >> low, value & ((_ONE << low) - _ONE)
        for key in keys[:, walking]:  # the halves change places, and so do their lengths
            left, right = right, left ^ (_mixed(right ^ key) & ((_ONE << high) - _ONE))
            high, low = low, high
        out[walking] = value = left << low | right
        walking = walking[value >= ends[walking]]
    return out.view(np.int64)


_ONE, _GOLDEN = np.uint64(1), 0x9E3779B97F4A7C15


def _mixed(x: np.ndarray) -> np.ndarray:
    """Return integers that look independent of the given ones, elementwise, uint64: MurmurHash3's finalizer."""
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ x >> np.uint64(33)) * np.uint64(multiplier)
    return x ^ x >> np.uint64(33)


def check_count(name: str, value: Any, least: int) -> None:
    """Raise `DataError` for what is no int of `least` or more."""
    if not is_int(value, least):
        raise DataError("not a count", where=name, got=repr(value)[:60], want=f"an int, {least} or more")


LAST = ("drop", "keep", "wrap")


@attrs.frozen
class Stream:
    """The rows of all epochs, concatenated and cut into batches.

    A row of the stream is an integer: `epoch * used + position in the epoch`. Batch i ends where batch i + 1 begins.
    """

    length: int  # rows of the data set
    batch_size: int  # rows of a whole batch
    last: str  # what to do with the rows left at the end of an epoch: one of LAST
    batches: int | None = None  # of a `BatchOrder`: in an epoch of the loader; each is an epoch of the stream

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
        return self.begin(batch) // self.used // (self.batches or 1)

    def end_of_epoch(self, batch: int) -> int:
        """Return the number of the first batch that begins in a later epoch than this one."""
        epochs = (self.epoch(batch) + 1) * (self.batches or 1)
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
