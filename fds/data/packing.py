"""Documents packed into rows of one length: `pack` says which, `packed` reads them, with positions and targets."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from fds.data.token_batches import as_lengths
from fds.data.tokens import as_tokens
from fds.errors import DataError, checked_call, is_int

IGNORED = -100  # a target that is none, for `cross_entropy`


@attrs.frozen(eq=False)
class Packing:
    """Pieces of documents in rows of `row_tokens` tokens; `len` is the number of rows. See `pack`."""

    row_tokens: int
    documents: np.ndarray = attrs.field(repr=lambda x: f"{len(x)} pieces")  # (P,) whose piece it is, row after row
    begins: np.ndarray = attrs.field(repr=False)  # (P,) its first token in its document
    lengths: np.ndarray = attrs.field(repr=False)  # (P,)
    firsts: np.ndarray = attrs.field(repr=lambda x: f"{len(x) - 1} rows")  # (R + 1,) the first piece of each row

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.firsts) - 1

    @property
    def fill(self) -> float:
        """The part of all rows that is tokens, not padding."""
        return float(self.lengths.sum() / (len(self) * self.row_tokens))

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """Return (document, first token, number of tokens) of each piece of a row."""
        at = slice(self.firsts[row], self.firsts[row + 1])
        return list(zip(self.documents[at].tolist(), self.begins[at].tolist(), self.lengths[at].tolist(), strict=True))

    def cumulative_lengths(self, row: int) -> np.ndarray:
        """Return where the pieces of a row begin, and where the last one ends, `(pieces + 1,) int32`."""
        lengths = self.lengths[self.firsts[row] : self.firsts[row + 1]]
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@checked_call
def pack(lengths: Sequence[int] | np.ndarray | Tensor, row_tokens: int) -> Packing:
    """Return which documents stand in which of the fewest rows of one length. Nothing is lost.

    Best fit, the longest first: a document goes to the row in which it leaves the least room. One that is longer than a
    row is cut into whole rows and a rest. Rows have documents of any length, so read them in a shuffled order.

    Time: O(n log n), 0.6 s for a million documents, 7 s where all lengths differ: equal ones are placed together.

    Args:
        lengths: tokens of each document, `(N,)`, 1 or more.
        row_tokens: tokens of a row.

    Raises `DataError`.

    Source: best fit decreasing, Johnson 1973; for documents, Ding et al. 2024, arXiv:2404.10830.

    >>> packing = pack([3, 9, 2, 2, 5], 8)
    >>> [packing.pieces(row) for row in range(len(packing))], packing.fill
    ([[(1, 0, 8)], [(0, 0, 3), (4, 0, 5)], [(1, 8, 1), (2, 0, 2), (3, 0, 2)]], 0.875)
    """
    tokens = as_lengths(lengths)
    if not is_int(row_tokens, 1):
        raise DataError("not a length", where="row_tokens", got=repr(row_tokens), want="an int, 1 or more")
    counts = -(-tokens // row_tokens)
    documents = np.repeat(np.arange(len(tokens)), counts)
    begins = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * row_tokens
    sizes = np.minimum(tokens[documents] - begins, row_tokens)
    by_size = np.argsort(-sizes, kind="stable")
    rows = np.empty(len(sizes), np.int64)
    rows[by_size] = _best_fit(sizes[by_size], row_tokens)
    order = np.argsort(rows, kind="stable")
    firsts = np.searchsorted(rows[order], np.arange(rows.max() + 2))
    return Packing(row_tokens, documents[order], begins[order], sizes[order], firsts)


def _best_fit(sizes: np.ndarray, room: int) -> np.ndarray:
    """Return the row of each piece, `(P,) int64`, of pieces that do not grow.

    Rows with equal room are alike, and so are pieces of equal size. So all pieces of a size are placed together: the
    rows with the least room that is enough get as many each as they take, then those with the next.
    """
    out, number = np.empty(len(sizes), np.int64), 0
    rooms: list[int] = []  # those that rows have, ascending
    rows_with: dict[int, list[np.ndarray]] = {}

    def keep(left: int, rows: np.ndarray) -> None:
        if left and len(rows):
            if left not in rows_with:
                bisect.insort(rooms, left)
            rows_with.setdefault(left, []).append(rows)

    ends = np.append(np.flatnonzero(np.diff(sizes)) + 1, len(sizes)).tolist()
    begin = 0
    for end in ends:
        size = int(sizes[begin])
        while begin < end:
            place = bisect.bisect_left(rooms, size)
            if place == len(rooms):
                left, needed = room, -(-(end - begin) // (room // size))
                rows = np.arange(number, number + needed)
                number += needed
            else:
                left = rooms[place]
                rows = rows_with[left].pop()
                if not rows_with[left]:
                    del rows_with[left], rooms[place]
            each = left // size
            whole, more = divmod(min(end - begin, each * len(rows)), each)
            used = whole + (more > 0)
            out[begin : begin + whole * each + more] = np.repeat(rows[:used], each)[: whole * each + more]
            begin += whole * each + more
            keep(left, rows[used:])
            keep(left - each * size, rows[:whole])
            keep(left - more * size, rows[whole:used])
    return out


@attrs.frozen(eq=False)
class PackedRows:
    """The rows of a packing, read: a data set. See `packed`."""

    dataset: Any = attrs.field(repr=lambda it: f"{type(it).__name__} of {len(it)}")
    packing: Packing
    pad: int

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.packing)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        """Return a row: `tokens`, `targets`, `positions` and `documents`, each `(row_tokens,) int64`."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        out = np.full((4, self.packing.row_tokens), [[self.pad], [IGNORED], [0], [-1]], np.int64)
        place = 0
        for number, (document, begin, length) in enumerate(self.packing.pieces(row)):
            tokens = as_tokens(self.dataset[document], f"dataset[{document}]")
            if len(tokens) < begin + length:
                got, want = f"{tokens.dtype} {tokens.shape}", f"({begin + length},) tokens or more, as `lengths` says"
                raise DataError("a document of another length", where=f"dataset[{document}]", got=got, want=want)
            following = tokens[begin + 1 : begin + length + 1]
            here = out[:, place : place + length]
            here[0], here[2], here[3] = tokens[begin : begin + length], np.arange(begin, begin + length), number
            here[1, : len(following)] = following
            place += length
        return dict(zip(("tokens", "targets", "positions", "documents"), torch.from_numpy(out), strict=True))


@checked_call
def packed(
    dataset: Any, row_tokens: int, *, lengths: Sequence[int] | np.ndarray | Tensor | None = None, pad: int = 0
) -> PackedRows:
    """Return the data set of rows of one length into which the documents of another are packed, by `pack`.

    A row is a dict of `(row_tokens,)` int64 tensors:
        tokens: those of its documents, one after another, then `pad`.
        targets: the next token of the same document; -100, which `cross_entropy` ignores, at its end and in padding.
        positions: of each token in its document, from 0.
        documents: 0, 1, ... for the documents of the row, -1 for padding: as `attention(documents=)` takes them.

    Args:
        dataset: documents, each a sequence of integers: a `TokenFile`, a list of tensors.
        row_tokens: tokens of a row.
        lengths: tokens of each document; None is `dataset.lengths`, where there is such a thing, or else every document
            is read once.
        pad: the token that fills rows up.

    Raises `DataError`.

    >>> rows = packed([[1, 2, 3], [4, 5]], 6)
    >>> [x.tolist() for x in rows[0].values()]
    [[1, 2, 3, 4, 5, 0], [2, 3, -100, 5, -100, -100], [0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 1, -1]]
    """
    if not is_int(pad) or not -(2**63) <= pad < 2**63:
        raise DataError("not a token", where="pad", got=repr(pad), want="an int of 64 bits")
    if lengths is None:
        lengths = getattr(dataset, "lengths", None)
    try:
        lengths = [len(dataset[i]) for i in range(len(dataset))] if lengths is None else lengths
        number = len(dataset)
    except (TypeError, KeyError):
        got, want = type(dataset).__name__, "documents with a length each, dataset[i], and len(dataset)"
        raise DataError("not a data set of documents", where="dataset", got=got, want=want) from None
    if not hasattr(lengths, "__len__"):
        raise DataError("not lengths of documents", where="lengths", got=type(lengths).__name__, want="a sequence")
    if len(lengths) != number:
        got, want = f"{len(lengths)} lengths", f"{number}, one for each document"
        raise DataError("lengths of other documents", where="lengths", got=got, want=want)
    return PackedRows(dataset, pack(lengths, row_tokens), pad)
