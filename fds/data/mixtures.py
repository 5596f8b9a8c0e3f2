"""One data set of several: `mixture`, in proportions that may change, each part in a shuffled order of its own."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from torch import Tensor

from fds import random
from fds.data.orders import key_words, permutation, permute_each
from fds.errors import DataError, checked_call

Weights = Mapping[str, float] | Sequence[float]
_BLOCK = 1 << 12  # batches whose counts are computed together, where weights follow a function


@attrs.frozen(eq=False)
class Mixture:
    """Rows of several data sets, one after another, and the order in which a loader reads them: see `mixture`."""

    datasets: tuple[Any, ...]
    names: tuple[str, ...]
    weights: Weights | Callable[[int], Weights] = attrs.field(repr=False)
    key: Tensor = attrs.field(repr=False)
    lengths: np.ndarray = attrs.field(repr=False)  # (S,) int64
    # by size of batches, where weights follow a function: what was due and taken before each block, and the last table
    _blocks: dict[int, _Blocks] = attrs.field(factory=dict, repr=False, init=False)

    def __len__(self) -> int:
        """Return the number of rows of all data sets."""
        return int(self.lengths.sum())

    def __getitem__(self, i: int) -> Any:
        """Return row i, counted through all data sets."""
        ends = np.cumsum(self.lengths)
        source = bisect.bisect_right(ends, i)
        if not 0 <= i < ends[-1]:
            raise IndexError(i)
        return self.datasets[source][i - int(ends[source] - self.lengths[source])]

    def num_batches(self, size: int) -> int:
        """Return the number of batches of `size` rows after which as many rows were read as there are."""
        return max(len(self) // size, 1)

    def counts(self, batch: int, size: int) -> np.ndarray:
        """Return how many rows of each data set are in all batches of `size` before this one, `(S,) int64`."""
        if callable(self.weights):
            return self._blocks.setdefault(size, _Blocks(self, size)).before(batch)
        shares = self._shares([self.weights])
        return _taken(shares, np.array([0, batch * size]), np.zeros(len(self.names)))[0][-1]

    def rows(self, batch: int, size: int) -> np.ndarray:
        """Return the row numbers of a batch, `(size,) int64`, of its data sets in random order."""
        before, after = self.counts(batch, size), self.counts(batch + 1, size)
        order = permutation(random.fold_in(self.key, "batch", batch), size)
        source = np.repeat(np.arange(len(self.names)), after - before)
        number = np.arange(size) + np.repeat(before - (np.cumsum(after - before) - (after - before)), after - before)
        epochs, at = np.divmod(number, self.lengths[source])
        words = key_words(random.fold_in(self.key, "rows"), source, epochs)
        firsts = np.cumsum(self.lengths) - self.lengths
        return (firsts[source] + permute_each(words, self.lengths[source], at))[order]

    def _shares(self, weights: list[Any], first: int | None = None) -> np.ndarray:
        """Return which part each data set has of what it and those after it have together, `(len(weights), S)`."""
        values = np.zeros((len(weights), len(self.names)))
        for i, of_batch in enumerate(weights):
            try:
                numbers = of_batch
                if isinstance(of_batch, Mapping):
                    numbers = [of_batch[name] for name in self.names] if len(of_batch) == len(self.names) else []
                values[i] = numbers if len(numbers) == len(self.names) else np.nan
            except (TypeError, ValueError, KeyError):
                values[i] = np.nan
        with np.errstate(over="ignore"):
            totals = values.sum(1)
        bad = ~(np.isfinite(values).all(1) & (values >= 0).all(1) & (totals > 0) & np.isfinite(totals))
        if bad.any():
            i = int(bad.argmax())
            want = f"a number of 0 or more for each of {', '.join(self.names)}, not all 0"
            where = "weights" if first is None else f"weights({first + i})"
            raise DataError("not weights of a mixture", where=where, got=repr(weights[i])[:80], want=want)
        rest = np.cumsum(values[:, ::-1], 1)[:, ::-1]
        return np.divide(values, rest, out=np.zeros_like(values), where=rest > 0)


class _Blocks:
    """The counts of a mixture whose weights follow a function: of a block of batches, and those before each block."""

    def __init__(self, mixture: Mixture, size: int):
        self.mixture, self.size = mixture, size
        sources = len(mixture.names)
        self.starts = [(np.zeros(sources, np.int64), np.zeros(sources))]  # rows taken, and rows due beyond
        self.last: tuple[int, np.ndarray] | None = None

    def before(self, batch: int) -> np.ndarray:
        block, place = divmod(batch, _BLOCK)
        if self.last is None or self.last[0] != block:
            for number in range(min(len(self.starts) - 1, block), block + 1):
                table = self._table(number)
            self.last = block, table
        return self.last[1][place]

    def _table(self, block: int) -> np.ndarray:
        taken, due = self.starts[block]
        first = block * _BLOCK
        weights = [self.mixture.weights(i) for i in range(first, first + _BLOCK)]  # type: ignore[operator]
        shares = self.mixture._shares(weights, first)
        more, due = _taken(shares, np.arange(_BLOCK + 1) * self.size, due)
        if len(self.starts) == block + 1:
            self.starts.append((taken + more[-1], due))
        return taken + more


def _taken(shares: np.ndarray, totals: np.ndarray, due: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many rows of each data set are among the first `totals[i]` rows, `(T, S) int64`, and what is due then.

    The first data set takes its share of all rows, rounded, the second its share of the rows which are left, and so on.
    So no count ever falls, their sum is exact, and S counts are at most S / 2 rows away from their weights of all.

    Args:
        shares: `(T - 1, S)`, or `(1, S)` for all, of what a data set and those after it have together.
        totals: `(T,)` integers that do not fall.
        due: `(S,)`, by how much the share of each is above the rows that it took, at `totals[0]`.
    """
    left, counts, rests = totals, [], []
    for source in range(len(due)):
        steps = np.diff(left) * shares[:, source]
        sums = due[source] + np.concatenate([[0.0], np.cumsum(steps)])
        count = np.floor(sums + 0.5).astype(np.int64)
        counts.append(count)
        rests.append(sums[-1] - count[-1])
        left = left - count
    return np.stack(counts, 1), np.array(rests)


@checked_call
def mixture(
    datasets: Mapping[str, Any] | Sequence[Any], weights: Weights | Callable[[int], Weights], *, key: int | Tensor = 0
) -> Mixture:
    """Return a data set of the rows of several, which says itself in which order a `DistributedLoader` reads them.

    Of the rows of all batches until now every data set has its part: of two it is never more than half a row away from
    it, of S never more than S / 2 rows where weights are fixed. A data set is read in a shuffled order, in another one
    each time that it was read to its end. So small ones are repeated, and large ones perhaps never finished; an epoch
    of the loader is as many rows as there are.

    Which rows batch i has is a function of the key, i and the batch size; orders take no memory. Weights that follow a
    function are asked for every batch before once, when a run is resumed (10 us each), and up to 4,096 batches ahead.

    Args:
        datasets: by name, or a sequence of them, which have the names "0", "1", ...: each with `len` and `[i]`.
        weights: how many rows of each, in proportion; or a function of the number of the batch, 0 for the first, that
            returns them. In the order of the data sets, or by name.
        key: an int or a key of `fds.random.key`, the same on every rank.

    Raises `DataError`.

    >>> web, code = list(range(100)), list(range(1000, 1010))
    >>> mixed = mixture({"web": web, "code": code}, {"web": 3, "code": 1})
    >>> [sum(mixed[i] >= 1000 for i in mixed.rows(batch, 6)) for batch in range(4)]
    [1, 2, 1, 2]
    """
    named = datasets if isinstance(datasets, Mapping) else None
    if named is None and isinstance(datasets, Sequence) and not isinstance(datasets, str):
        named = {str(i): dataset for i, dataset in enumerate(datasets)}
    lengths = [_length(name, dataset) for name, dataset in (named or {}).items()]
    if not named:
        want = "a dict or a list of data sets"
        raise DataError("no data sets to mix", where="datasets", got=repr(datasets)[:60], want=want)
    mixed = Mixture(tuple(named.values()), tuple(map(str, named)), weights, random.key(key), np.array(lengths))
    mixed.counts(1, 1)  # refuses weights
    return mixed


def _length(name: Any, dataset: Any) -> int:
    try:
        if hasattr(dataset, "__getitem__") and not isinstance(dataset, Mapping) and len(dataset) > 0:
            return len(dataset)
    except (TypeError, NotImplementedError):
        pass
    want = "len(dataset) of 1 or more, and dataset[i]"
    raise DataError("not a data set to mix", where=f"datasets[{name!r}]", got=type(dataset).__name__, want=want)
