"""Microbatches of as many padded rows as a bound on tokens allows, and learning rates that follow their numbers."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from fds import random
from fds.data.orders import check_count, permutation, permute
from fds.errors import DataError, checked_call, did_you_mean, is_number

ORDERS = ("dataloader", "random", "seqlen", "bucketed")
METHODS = {"linear": lambda factor: factor, "sqrt": np.sqrt}
_EPOCHS = 16  # after which the order of batches comes again, so that a table of learning rates has an end


@attrs.frozen(eq=False)
class TokenBatches:
    """Microbatches of rows, bounded by tokens: a `BatchOrder` of a `DistributedLoader`. See `batches_by_tokens`."""

    samples: np.ndarray = attrs.field(repr=lambda x: f"{len(x)} rows")  # (N,) int64, those of a microbatch together
    firsts: np.ndarray = attrs.field(repr=lambda x: f"{len(x) - 1} microbatches")  # (M + 1,) where each begins
    min_rows: int
    key: Tensor | None = attrs.field(repr=False)  # of the order of batches in an epoch; None is that of the rows
    _divided: dict[int, np.ndarray] = attrs.field(factory=dict, init=False, repr=False)

    @property
    def num_samples(self) -> int:
        """The number of rows of the data set."""
        return len(self.samples)

    def rows(self, batch: int, size: int) -> list[np.ndarray]:
        """Return the row numbers of each of the `size` microbatches of a batch. Raises `DataError` for no counts."""
        check_count("batch", batch, 0)
        firsts, number = self._firsts(size), self.num_batches(size)
        epoch, place = divmod(batch, number)
        first = size * int(self._order(epoch, number, np.array([place]))[0])
        return [self.samples[firsts[i] : firsts[i + 1]] for i in range(first, first + size)]

    def num_batches(self, size: int) -> int:
        """Return the number of batches of `size` microbatches in an epoch."""
        return (len(self._firsts(size)) - 1) // size

    def num_rows(self, epoch: int, size: int) -> np.ndarray:
        """Return the number of rows of each batch of an epoch, `(num_batches,) int64`."""
        number = self.num_batches(size)
        return np.diff(self._firsts(size)[::size])[self._order(epoch, number, np.arange(number))]

    def rate(
        self, schedule: Callable[[Any], Any] | float, size: int, *, base: int, method: str = "linear"
    ) -> ScaledRate:
        """Return a learning rate that follows the number of rows of each batch.

            f(t) = schedule(t) * (rows of batch t / base)          linear: Goyal et al. 2017, arXiv:1706.02677
            f(t) = schedule(t) * sqrt(rows of batch t / base)      sqrt: Krizhevsky 2014, arXiv:1404.5997

        t counts updates. It is the number of the batch as long as none is skipped, by `loss_scale` say.

        Args:
            schedule: of `fds.schedules` or any other f(t), or a number.
            size: microbatches of a batch: the batch size of the loader.
            base: rows of the batch for which `schedule` is meant.
            method: "linear" or "sqrt".

        Raises `DataError`.
        """
        if not callable(schedule) and not (is_number(schedule) and math.isfinite(schedule)):
            want = "a number, or a function of t"
            raise DataError("not a learning rate", where="schedule", got=repr(schedule)[:60], want=want)
        check_count("base", base, 1)
        if not isinstance(method, str) or method not in METHODS:
            want, hint = " or ".join(map(repr, METHODS)), did_you_mean(str(method), METHODS)
            raise DataError("unknown way to scale a rate", where="method", got=repr(method), want=want, hint=hint)
        rows = np.concatenate([self.num_rows(epoch, size) for epoch in range(1 if self.key is None else _EPOCHS)])
        return ScaledRate(schedule, torch.from_numpy(METHODS[method](rows / base)))

    def _order(self, epoch: int, number: int, places: np.ndarray) -> np.ndarray:
        if self.key is None:
            return places
        return permute(random.fold_in(self.key, "epoch", epoch % _EPOCHS), number, places)

    def _firsts(self, size: int) -> np.ndarray:
        """Return where microbatches begin, a multiple of `size`: those of most rows are halved until it fits."""
        check_count("size", size, 1)
        if size not in self._divided:
            sizes = np.diff(self.firsts)
            lacking = -len(sizes) % size
            heap = [(-rows, first) for rows, first in zip(sizes.tolist(), self.firsts.tolist(), strict=False)]
            heapq.heapify(heap)
            more = []
            for _ in range(lacking):
                rows, first = heapq.heappop(heap)
                half = -rows // 2
                if half < max(self.min_rows, 1):
                    got, want = f"{len(sizes)} microbatches", f"a multiple of {size}, the batch size"
                    hint = "fewer microbatches in a batch, a smaller max_tokens or min_rows"
                    what = "the microbatches do not fill batches, and none has rows enough to be halved"
                    raise DataError(what, where="batch_size", got=got, want=want, hint=hint)
                more.append(first + half)
                heapq.heappush(heap, (-half, first))
                heapq.heappush(heap, (rows + half, first + half))
            self._divided[size] = np.sort(np.concatenate([self.firsts, np.array(more, np.int64)]))
        return self._divided[size]


@attrs.frozen(eq=False)
class ScaledRate:
    """A learning rate times the factor of each batch, a schedule f(t): see `TokenBatches.rate`."""

    schedule: Callable[[Any], Any] | float
    factors: Tensor = attrs.field(repr=lambda x: f"{len(x)} factors")  # float64, of the batches; they come again
    _copies: dict[torch.device, Tensor] = attrs.field(factory=dict, init=False, repr=False)

    @property
    def draws(self) -> bool:
        """Whether the schedule may draw random numbers."""
        return callable(self.schedule) and getattr(self.schedule, "draws", True)

    def __call__(self, t: Any) -> Any:
        """Return the rate of the update with t before it: a float, or a tensor on the device of t."""
        value = self.schedule(t) if callable(self.schedule) else self.schedule
        if not isinstance(t, Tensor):
            return float(value * self.factors[max(int(t), 0) % len(self.factors)])
        if t.device not in self._copies:  # copied once: waits for the device
            self._copies[t.device] = self.factors.to(t.device)
        place = t.clamp(min=0).long() % len(self.factors)
        return value * torch.take(self._copies[t.device], place)


@checked_call
def batches_by_tokens(
    lengths: Sequence[int] | np.ndarray | Tensor,
    max_tokens: int,
    *,
    order: str = "bucketed",
    min_rows: int = 1,
    max_rows: int | None = None,
    key: int | Tensor = 0,
) -> TokenBatches:
    """Return microbatches of rows that, padded to their longest row, have at most `max_tokens` tokens. No row is lost.

    It is the sampler of a `DistributedLoader` whose batch size is then the number of microbatches of all ranks. A rank
    gets its own as `Microbatches`, each collated by itself. Which rows a microbatch has is the same in every epoch;
    where an order is random, batches come in another order in each of 16 epochs. A batch is found without those before
    it. To fill the last batch, microbatches of most rows are halved.

    A loss that returns a `Mean` of totals and numbers of tokens has then the mean over all tokens of the batch,
    whatever the rows of its microbatches.

    Time: 0.4 s for a million rows, once. Memory: 8 bytes a row.

    Args:
        lengths: tokens of each row, `(N,)`, 1 or more.
        max_tokens: rows times the longest of them, at most, in each microbatch.
        order: in which rows are put into microbatches, one after another.
            "bucketed": rows of like length together, equal ones shuffled; batches in random order.
            "seqlen": the shortest first, and so are batches.
            "random": shuffled; batches in random order.
            "dataloader": as they are, and so are batches.
        min_rows: rows of a microbatch, at least.
        max_rows: rows of a microbatch, at most; None is any number.
        key: an int or a key of `fds.random.key`, the same on every rank.

    Raises `DataError`, also where a row is too long.

    >>> batches = batches_by_tokens([3, 1, 2, 4, 1, 1], 4, order="dataloader")
    >>> [[rows.tolist() for rows in batches.rows(batch, 2)] for batch in range(2)]
    [[[0], [1, 2]], [[3], [4, 5]]]
    """
    tokens = as_lengths(lengths)
    for name, count in (("max_tokens", max_tokens), ("min_rows", min_rows), ("max_rows", max_rows)):
        if name != "max_rows" or count is not None:
            check_count(name, count, 1)
    if max_rows is not None and max_rows < min_rows:
        got = f"min_rows={min_rows}, max_rows={max_rows}"
        raise DataError("a microbatch cannot have so many rows", where="min_rows, max_rows", got=got, want="min <= max")
    if order not in ORDERS:
        want, hint = " or ".join(map(repr, ORDERS)), did_you_mean(str(order), ORDERS)
        raise DataError("unknown order", where="order", got=repr(order), want=want, hint=hint)
    if (bad := np.flatnonzero(tokens * min_rows > max_tokens)).size:
        at_least = f", and {min_rows} of them at least" * (min_rows > 1)
        got, want = f"{len(bad)} rows, the first {bad[0]} of {tokens[bad[0]]} tokens{at_least}", f"{max_tokens} tokens"
        hint = "fds.data.pack cuts them; or a Subset of the others"
        raise DataError("a row is longer than a microbatch may be", where="lengths", got=got, want=want, hint=hint)
    key = random.key(key)
    samples = np.arange(len(tokens))
    if order in ("random", "bucketed"):
        samples = permutation(random.fold_in(key, "rows"), len(tokens))
    if order in ("seqlen", "bucketed"):
        samples = samples[np.argsort(tokens[samples], kind="stable")]
    firsts = _cut(tokens[samples].tolist(), max_tokens, max_rows or len(tokens))
    _fill_up(firsts, min_rows)
    return TokenBatches(samples, np.array(firsts), min_rows, key if order in ("random", "bucketed") else None)


def _cut(tokens: list[int], max_tokens: int, max_rows: int) -> list[int]:
    """Return where microbatches begin, and the end: each has as many rows as it may."""
    firsts, rows, longest = [0], 0, 0
    for i, length in enumerate(tokens):
        longest = max(longest, length)
        rows += 1
        if rows * longest > max_tokens or rows > max_rows:
            firsts.append(i)
            rows, longest = 1, length
    return [*firsts, len(tokens)]


def _fill_up(firsts: list[int], min_rows: int) -> None:
    """Move rows into the last microbatch from those before it, until each has its least number. Raises `DataError`."""
    for i in range(len(firsts) - 2, 0, -1):
        if firsts[i + 1] - firsts[i] >= min_rows:
            return
        firsts[i] = firsts[i + 1] - min_rows
    if firsts[1] < min_rows:
        got = f"{firsts[-1]} rows, of which {firsts[1]} are left over"
        hint = "another min_rows or max_tokens"
        raise DataError("the rows do not divide", where="min_rows", got=got, want=f"{min_rows} or more", hint=hint)


def as_lengths(lengths: Any) -> np.ndarray:
    """Return lengths of rows, `(N,) int64`. Raises `DataError` for what is none."""
    try:
        tokens = lengths.numpy(force=True) if isinstance(lengths, Tensor) else np.asarray(lengths)
    except (TypeError, ValueError):
        tokens = np.empty(())
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        got, want = f"{tokens.dtype} {tokens.shape}", "integers, one for each row: (N,)"
        raise DataError("not lengths of rows", where="lengths", got=got, want=want)
    if tokens.min() < 1:
        got = f"{tokens.min()}, of row {tokens.argmin()}"
        raise DataError("a row without tokens", where="lengths", got=got, want="1 or more")
    return tokens.astype(np.int64)
