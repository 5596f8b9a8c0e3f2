"""Visits of an update: each chunk is read from where its leaves live, updated, and written back."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.step.residency.chunks import Piece
from fds.step.residency.contract import OnDevice, Residency, read_back, waiting
from fds.step.residency.lives import Column, Lives

Run = Callable[[list[Piece], list[Tensor], list[Column], torch.device], list[Column]]
Read = Callable[[], list[list[Tensor]]]


def _nothing() -> None:
    """Wait for nothing."""


@attrs.define(eq=False)
class Visit:
    """One chunk after another is updated, as soon as its gradients are complete: the next is read, the last written.

    Attributes:
        chunks: in this order.
        run: updates pieces, given their gradients and columns to write into, all on a device, and returns what the
            columns become.
        first: is called once, before the first leaf is written that is not `apart`, or at the end.
        grads: slice -> its complete gradient, where that lives.
        stale: slices that were updated before more was added to their gradients.
    """

    chunks: Sequence[Chunk]
    run: Run
    first: Callable[[], None]
    grads: dict[int, Tensor] = tree.new(dict)
    stale: set[int] = tree.new(set)
    at: int = 0  # which chunk is the next
    reading: Read | None = None  # waits for its leaves
    taking: Read | None = None  # waits for its gradients
    writing: Callable[[], Any] = _nothing  # waits for the last one
    begun: bool = False

    def tell(self, grads: Mapping[int, Tensor]) -> None:
        """Take gradients that are complete, and update all chunks up to the first that lacks one.

        One that turns out not to have been complete comes again.
        """
        if not self.grads.keys().isdisjoint(grads):
            self.stale.update(x.index for chunk in self.chunks[: self.at] for x in chunk.pieces if x.index in grads)
        self.grads.update(grads)
        while self.at < len(self.chunks):
            chunk = self.chunks[self.at]
            self._read(chunk)
            if self.taking is None:
                return
            self._update(chunk)

    def settle(self) -> None:
        """Wait until what was updated is written."""
        written, self.writing = self.writing, _nothing
        written()

    def finish(self, grads: Mapping[int, Tensor]) -> None:
        """Take all gradients, and update what is left."""
        try:
            self.tell(grads)
            self.settle()
            self._begin()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait for what is read and written, whatever comes of it: nobody may use this memory from here on."""
        for wait in (self.reading, self.taking, self.writing):
            with contextlib.suppress(Exception):
                if wait is not None:
                    wait()

    def _read(self, chunk: Chunk) -> None:
        """Begin to read the leaves of the next chunk, and its gradients once they are complete."""
        if self.reading is None:
            self.reading = chunk.read()
        if self.taking is None and all(x.index in self.grads for x in chunk.pieces):
            self.taking = chunk.take(self.grads)

    def _update(self, chunk: Chunk) -> None:
        assert self.reading is not None and self.taking is not None
        read, self.reading = self.reading(), None
        taken, self.taking = self.taking(), None
        self.at += 1
        if self.at < len(self.chunks):
            self._read(self.chunks[self.at])
        if chunk.in_place:
            self._begin()
        columns = self.run(chunk.pieces, chunk.gradients(self.grads, taken), chunk.worked(read), chunk.device)
        self.settle()
        if not chunk.apart:
            self._begin()
        self.writing = chunk.write(columns)

    def _begin(self) -> None:
        if not self.begun:
            self.first()
        self.begun = True


@attrs.frozen(eq=False)
class Chunk:
    """Slices that are updated together: of parameters and of every slot of the optimizer a column of flat leaves."""

    pieces: list[Piece]
    device: torch.device  # on which these are updated
    apart: bool  # whether the leaves of the new state are in memory of their own, and the old ones stay as they are
    new: list[Column]  # the leaves of the new state
    copied: list[tuple[Residency, list[tuple[int, int]], list[Tensor]]]  # by whom; column and row; old values
    kept: list[tuple[Tensor, Tensor]]  # leaves that are written where they are, `apart`, and their old values
    copied_gradients: list[tuple[Residency, list[int]]]  # gradients that are copied: by whom, and which

    @property
    def in_place(self) -> bool:
        """Whether the update writes into leaves that the old state may have too."""
        leaves = sum(x is not None for column in self.new for x in column)
        return not self.apart and sum(len(places) for _, places, _ in self.copied) < leaves

    def read(self) -> Read:
        """Begin to read leaves; return the function that waits, and returns the copies by reader."""
        return _reading([(by, old) for by, _, old in self.copied], self.device)

    def take(self, grads: Mapping[int, Tensor]) -> Read:
        """Begin to read gradients; return the function that waits, and returns the copies by reader."""
        readers = ((by, [self.pieces[r] for r in rows]) for by, rows in self.copied_gradients)
        return _reading([(by, [x.cut(grads[x.index].view(-1)) for x in pieces]) for by, pieces in readers], self.device)

    def gradients(self, grads: Mapping[int, Tensor], taken: list[list[Tensor]]) -> list[Tensor]:
        """Return the gradients for the optimizer, which may write into them."""
        gradients = [x.cut(grads[x.index]) for x in self.pieces]
        for (_, rows), copies in zip(self.copied_gradients, taken, strict=True):
            for row, x in zip(rows, copies, strict=True):
                gradients[row] = x
        return gradients

    def worked(self, read: list[list[Tensor]]) -> list[Column]:
        """Return the columns for the optimizer to write into."""
        columns = [list(column) for column in self.new]
        for (_, places, _), copies in zip(self.copied, read, strict=True):
            for (column, row), x in zip(places, copies, strict=True):
                columns[column][row] = x
        for new, old in self.kept:
            new.copy_(old)
        return columns

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


def chunks_of_leaves(
    lives: Lives, new: Sequence[Column], old: Sequence[Column], chunks: Iterable[list[Piece]], *, ahead: bool
) -> list[Chunk]:
    """Return the chunks of slices, or pieces of them: of those that are updated `ahead`, or of all others.

    Args:
        lives: where the leaves live, and how to get at them.
        new: leaves of the new state, the parameters' first, then those of every slot of the optimizer.
        old: their values.
        chunks: the slices, or pieces of them, that are updated together.
        ahead: which of these.
    """
    selected = ([x for x in pieces if lives.ahead[x.index] is ahead] for pieces in chunks)
    return list(itertools.chain.from_iterable(_chunks(lives, new, old, pieces, apart=ahead) for pieces in selected))


def _chunks(
    lives: Lives, new: Sequence[Column], old: Sequence[Column], pieces: list[Piece], *, apart: bool
) -> Iterator[Chunk]:
    """Yield the pieces of all columns that are updated together: first those on the device, then those on the host."""
    for on_host in (False, True):
        group = [x for x in pieces if lives.on_host[x.index] is on_host]
        if not group:
            continue
        columns = [[x.cut(leaf) if (leaf := column[x.index]) is not None else None for x in group] for column in new]
        places: dict[str, list[tuple[int, int]]] = {"place": [], "read": [], "fetch": []}
        for c, ways in enumerate(lives.ways):
            for r, x in enumerate(group):
                if (way := ways[x.index]) is not None:
                    places[way].append((c, r))
        ways = [lives.gradients[x.index] for x in group]
        if apart:  # the true gradient is needed again, if the step decides otherwise
            ways = ["fetch" if way == "place" else way for way in ways]
        readers = ((lives.residency, "read"), (lives.residency if on_host else OnDevice(), "fetch"))
        yield Chunk(
            group,
            torch.device("cpu") if on_host else lives.device,
            apart,
            columns,
            [(by, places[way], _at(old, group, places[way])) for by, way in readers if places[way]],
            list(zip(*(_at(leaves, group, places["place"]) for leaves in (new, old)), strict=True)) if apart else [],
            [(by, [r for r, x in enumerate(ways) if x == way]) for by, way in readers if way in ways],
        )


def _at(columns: Sequence[Column], pieces: list[Piece], places: list[tuple[int, int]]) -> list[Tensor]:
    """Return the leaves at these columns and rows, flat: of each what its piece is of it."""
    leaves = ((pieces[r], columns[c][pieces[r].index]) for c, r in places)
    return [piece.cut(leaf.reshape(-1)) for piece, leaf in leaves if leaf is not None]


def _reading(reads: list[tuple[Residency, list[Tensor]]], device: torch.device) -> Read:
    """Begin to read flat leaves; return the function that waits for all, and returns the copies."""
    waits = [(by, old, waiting(by, "read", by.read(old, device))) for by, old in reads]
    done = _together([wait for _, _, wait in waits])
    return lambda: [read_back(by, x, old, device) for (by, old, _), x in zip(waits, done(), strict=True)]


def _together(waits: list[Callable[[], Any]]) -> Callable[[], list[Any]]:
    """Return a function that waits for all, even if one fails: nobody may write into this memory from there on."""

    def wait() -> list[Any]:
        done: list[Any] = []
        failed: list[BaseException] = []
        for wait_for_one in waits:
            try:
                done.append(wait_for_one())
            except BaseException as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return done

    return wait
