"""Visits of an update: each chunk is read from where its leaves live, updated, and written back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.step.residency.chunks import Piece
from fds.step.residency.contract import OnDevice, Residency, read_back, waiting
from fds.step.residency.lives import Column, Lives

HOST = torch.device("cpu")
Run = Callable[[list[Piece], list[Tensor], list[Column], torch.device], list[Column]]


def visit(
    lives: Lives,
    new: Sequence[Column],
    old: Sequence[Column],
    grads: list[Tensor],
    chunks: list[list[Piece]],
    run: Run,
    first: Callable[[], None],
) -> None:
    """Update one chunk after another, while the next one is read and the last one is written.

    Args:
        lives: where the leaves live, and how to get at them.
        new: leaves of the new state, the parameters' first, then those of every slot of the optimizer.
        old: their values.
        grads: gradients of the slices.
        chunks: the slices, or pieces of them, that are updated together.
        run: updates pieces, given their gradients and columns to write into, all on a device, and returns what the
            columns become.
        first: is called before the first leaf is written.
    """
    parts = [one for pieces in chunks for one in _chunks(lives, new, old, grads, pieces)]
    reading: Callable[[], Any] = parts[0].read() if parts else _nothing
    writing: Callable[[], Any] = _nothing
    begun = False

    def begin() -> None:
        nonlocal begun
        if not begun:
            first()
        begun = True

    if not parts:
        begin()
    try:
        for i, part in enumerate(parts):
            read, reading = reading(), _nothing
            if i + 1 < len(parts):
                reading = parts[i + 1].read()
            if part.in_place:
                begin()
            columns = run(part.pieces, *part.worked(read), part.device)
            written, writing = writing, _nothing
            written()
            begin()
            writing = part.write(columns)
        writing()
    except BaseException:
        for wait in (reading, writing):  # nobody may write into this memory from here on
            with contextlib.suppress(Exception):
                wait()
        raise


@attrs.frozen(eq=False)
class Chunk:
    """Slices that are updated together: of parameters and of every slot of the optimizer a column of flat leaves."""

    pieces: list[Piece]
    device: torch.device  # on which these are updated
    new: list[Column]  # the leaves of the new state
    copied: list[tuple[Residency, list[tuple[int, int]], list[Tensor]]]  # by whom; column and row; old values
    gradients: list[Tensor]
    given: list[tuple[Residency, list[int], list[Tensor]]]  # of those that are copied: by whom; index; values

    @property
    def in_place(self) -> bool:
        """Whether the update writes into leaves of the new state themselves."""
        return sum(len(places) for _, places, _ in self.copied) < sum(x is not None for some in self.new for x in some)

    def read(self) -> Callable[[], list[list[Tensor]]]:
        """Begin to read; return the function that waits, and returns the copies by reader, those of gradients last."""
        reads = [*((by, old) for by, _, old in self.copied), *((by, old) for by, _, old in self.given)]
        waits = [(by, old, waiting(by, "read", by.read(old, self.device))) for by, old in reads]
        done = _together([wait for _, _, wait in waits])
        return lambda: [read_back(by, x, old, self.device) for (by, old, _), x in zip(waits, done(), strict=True)]

    def worked(self, read: list[list[Tensor]]) -> tuple[list[Tensor], list[Column]]:
        """Return the gradients and the columns for the optimizer to write into."""
        columns, grads = [list(column) for column in self.new], list(self.gradients)
        for (_, places, _), some in zip(self.copied, read, strict=False):
            for (column, row), x in zip(places, some, strict=True):
                columns[column][row] = x
        for (_, rows, _), some in zip(self.given, read[len(self.copied) :], strict=True):
            for row, x in zip(rows, some, strict=True):
                grads[row] = x
        return grads, columns

    def write(self, columns: list[Column]) -> Callable[[], Any]:
        """Write what the optimizer returned, or begin to; return the function that waits."""
        copied = {place for _, places, _ in self.copied for place in places}
        for c, (column, leaves) in enumerate(zip(columns, self.new, strict=True)):
            for r, (x, leaf) in enumerate(zip(column, leaves, strict=True)):
                if x is not None and leaf is not None and x is not leaf and (c, r) not in copied:
                    leaf.copy_(x)
        waits: list[Callable[[], Any]] = []
        for by, places, _ in self.copied:
            pairs = [(columns[c][r], self.new[c][r]) for c, r in places]
            worked, new = [x for x, _ in pairs if x is not None], [leaf for _, leaf in pairs if leaf is not None]
            waits.append(waiting(by, "write", by.write(worked, new)))
        return _together(waits)


def _chunks(
    lives: Lives, new: Sequence[Column], old: Sequence[Column], grads: list[Tensor], pieces: list[Piece]
) -> Iterator[Chunk]:
    """Yield the pieces of all columns that are updated together: first those on the device, then those on the host."""
    for on_host in (False, True):
        some = [x for x in pieces if lives.on_host[x.index] is on_host]
        if not some:
            continue
        columns = [[x.cut(leaf) if (leaf := column[x.index]) is not None else None for x in some] for column in new]
        device = HOST if on_host else lives.device
        copied: list[tuple[Residency, list[tuple[int, int]], list[Tensor]]] = []
        given: list[tuple[Residency, list[int], list[Tensor]]] = []
        for by, way in ((lives.residency, "read"), (OnDevice(), "fetch")):
            places = [(c, r) for c, ways in enumerate(lives.ways) for r, x in enumerate(some) if ways[x.index] == way]
            values = [some[r].cut(leaf.reshape(-1)) for c, r in places if (leaf := old[c][some[r].index]) is not None]
            if places:
                copied.append((by, places, values))
            if rows := [r for r, x in enumerate(some) if lives.gradients[x.index] == way]:
                given.append((by, rows, [some[r].cut(grads[some[r].index].view(-1)) for r in rows]))
        yield Chunk(some, device, columns, copied, [x.cut(grads[x.index]) for x in some], given)


def _together(waits: list[Callable[[], Any]]) -> Callable[[], list[Any]]:
    """Return a function that waits for all, even if one fails: nobody may write into this memory from there on."""

    def wait() -> list[Any]:
        done: list[Any] = []
        failed: list[BaseException] = []
        for one in waits:
            try:
                done.append(one())
            except BaseException as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return done

    return wait


def _nothing() -> None:
    """Wait for nothing."""
