"""`Pattern`: which blocks of keys each block of queries of a head sees, in compressed sparse rows."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from fds.errors import AttentionLayoutError

CHUNK = 2**20  # listed blocks that are worked on at once: temporaries stay below 50 MB


def _read_only(array: Any, dtype: type) -> NDArray[Any]:
    try:
        array = np.ascontiguousarray(array, dtype=dtype).view()
    except (TypeError, ValueError) as error:
        raise AttentionLayoutError("not integers", where="Pattern", got=repr(array)[:80], want="an array") from error
    array.setflags(write=False)
    return array


def _is_pattern(starts: NDArray[Any], columns: NDArray[Any]) -> bool:
    if starts.ndim != 1 or columns.ndim != 1 or len(starts) < 2 or starts[0] != 0 or starts[-1] != len(columns):
        return False
    if (starts[1:] < starts[:-1]).any():
        return False
    if not len(columns):
        return True
    is_next = np.ones(len(columns) + 1, np.bool_)  # whether a column comes after that before it, or begins a row
    is_next[1:-1] = columns[1:] > columns[:-1]
    is_next[starts] = True
    return bool(is_next.all()) and columns.min() >= 0 and columns.max() < len(starts) - 1


@attrs.frozen(slots=False, eq=False, repr=False)
class Pattern:
    """The listed blocks of a head: those of row r are `columns[starts[r] : starts[r + 1]]`, ascending.

    Attributes:
        starts: (blocks + 1,) int64.
        columns: (nonzeros,) int32.

    Raises `AttentionLayoutError` for arrays that are no such rows: kernels read what they say.
    """

    starts: NDArray[np.int64] = attrs.field(converter=lambda x: _read_only(x, np.int64))
    columns: NDArray[np.int32] = attrs.field(converter=lambda x: _read_only(x, np.int32))

    def __attrs_post_init__(self) -> None:
        if not _is_pattern(self.starts, self.columns):
            raise AttentionLayoutError(
                "not the rows of a pattern",
                where="Pattern",
                got=f"starts {self.starts.tolist()!r:.80}, columns {self.columns.tolist()!r:.80}",
                want="starts from 0 to the number of columns; of each row different columns, ascending, below blocks",
            )

    @property
    def blocks(self) -> int:
        """Number of rows, and of columns."""
        return len(self.starts) - 1

    @property
    def nonzeros(self) -> int:
        """Number of listed blocks."""
        return len(self.columns)

    @functools.cached_property
    def digest(self) -> bytes:
        """A hash of what is listed, equal for equal patterns."""
        text = hashlib.blake2b(self.starts.tobytes(), digest_size=16)
        text.update(self.columns.data if self.nonzeros else b"")
        return text.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def row(self, index: int) -> NDArray[np.int32]:
        """Return the columns that a row lists, ascending."""
        return self.columns[self.starts[index] : self.starts[index + 1]]

    def pairs(self) -> Iterator[tuple[int, int, NDArray[Any], NDArray[Any]]]:
        """Yield first row, last row (exclusive), and rows and columns (n,) of what they list, of bounded size."""
        first = 0
        while first < self.blocks:
            last = int(np.searchsorted(self.starts, self.starts[first] + CHUNK, "right")) - 1
            last = min(max(last, first + 1), self.blocks)
            counts = np.diff(self.starts[first : last + 1])
            rows = np.repeat(np.arange(first, last, dtype=np.int32), counts)
            yield first, last, rows, self.columns[self.starts[first] : self.starts[last]]
            first = last

    def filtered(self, keeps: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]], blocks: int) -> Pattern:
        """Return the blocks for whose rows and columns `keeps` is True, as a pattern of so many blocks."""
        counts, columns = np.zeros(self.blocks, dtype=np.int64), []
        for first, last, rows, of_rows in self.pairs():
            kept = keeps(rows, of_rows)
            counts[first:last] = np.bincount(rows[kept] - first, minlength=last - first)
            columns.append(of_rows[kept])
        return Pattern(_starts(counts[:blocks]), np.concatenate(columns))

    def merged(self, other: Pattern, least: int) -> Pattern:
        """Return the blocks that at least `least` of both list: 1 for the union, 2 for the intersection."""
        counts, columns = np.zeros(self.blocks, dtype=np.int64), []
        rows_at_once = max(1, CHUNK * self.blocks // max(self.nonzeros + other.nonzeros, 1))
        for first in range(0, self.blocks, rows_at_once):
            last = min(first + rows_at_once, self.blocks)
            keys = np.sort(np.concatenate([self._keys(first, last), other._keys(first, last)]))
            twice = keys[1:] == keys[:-1]
            keys = keys[1:][twice] if least == 2 else keys[np.concatenate([[True], ~twice])[: len(keys)]]
            rows, of_rows = np.divmod(keys, self.blocks)
            counts[first:last] = np.bincount(rows - first, minlength=last - first)
            columns.append(of_rows.astype(np.int32))
        return Pattern(_starts(counts), np.concatenate(columns))

    def _keys(self, first: int, last: int) -> NDArray[np.int64]:
        rows = np.repeat(np.arange(first, last, dtype=np.int64), np.diff(self.starts[first : last + 1]))
        return rows * self.blocks + self.columns[self.starts[first] : self.starts[last]]

    def transposed(self) -> Pattern:
        """Return the pattern of rows and columns exchanged: which rows list each column."""
        counts = np.bincount(self.columns, minlength=self.blocks)
        rows = np.repeat(np.arange(self.blocks, dtype=np.int32), np.diff(self.starts))
        return Pattern(_starts(counts), rows[np.argsort(self.columns, kind="stable")])

    def as_array(self) -> NDArray[np.bool_]:
        """Return (blocks, blocks) bool, True where a block is listed."""
        array = np.zeros((self.blocks, self.blocks), dtype=np.bool_)
        for _, _, rows, columns in self.pairs():
            array[rows, columns] = True
        return array


def _starts(counts: NDArray[Any]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def of_array(array: NDArray[Any]) -> Pattern:
    """Return the pattern of an array (blocks, blocks): what is not zero is listed."""
    rows, columns = np.nonzero(array)
    return Pattern(_starts(np.bincount(rows, minlength=len(array))), columns)


def of_intervals(
    begins: NDArray[Any], ends: NDArray[Any], shared: NDArray[Any] | None = None, since: NDArray[Any] | None = None
) -> Pattern:
    """Return the pattern in which row r lists columns begins[r] to ends[r], and those that many rows share.

    Args:
        begins: (blocks,) the first column of each row's interval.
        ends: (blocks,) where it ends, exclusive.
        shared: columns that each row lists as well, ascending.
        since: of each of these the first row that lists it, ascending.
    """
    blocks = len(begins)
    shared = np.empty(0, np.int64) if shared is None else shared
    since = np.zeros(len(shared), np.int64) if since is None else since
    visible = np.searchsorted(since, np.arange(blocks), "right")  # how many of the shared columns a row lists
    ends = np.maximum(begins, ends)
    before = np.minimum(np.searchsorted(shared, begins), visible)
    after = np.minimum(np.searchsorted(shared, ends), visible)
    # A row is three runs of consecutive entries of `source`: shared columns, its interval, shared columns.
    source = np.concatenate([shared, np.arange(blocks)]).astype(np.int32)
    zeros, n = np.zeros(blocks, np.int64), len(shared)
    at = np.stack([zeros, n + begins, after], axis=1)
    lengths = np.stack([before, ends - begins, visible - after], axis=1)
    counts = lengths.sum(1)
    starts = _starts(counts)
    columns = np.empty(int(starts[-1]), np.int32)
    first = 0
    while first < blocks:
        last = max(int(np.searchsorted(starts, starts[first] + CHUNK // 8, "right")) - 1, first + 1)
        runs, firsts = lengths[first:last].ravel(), at[first:last].ravel()
        stops = np.cumsum(runs)
        steps = np.repeat(firsts - stops + runs, runs)
        columns[starts[first] : starts[last]] = source[steps + np.arange(len(steps))]
        first = last
    return Pattern(starts, columns)
