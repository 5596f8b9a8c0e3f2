"""Chunks of an update: each is read from where its leaves live, updated, and written back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.step.residency import Residency, read_back, waiting

Column = list[Tensor | None]  # of flat leaves
Run = Callable[[list[int], list[Column]], list[Column]]


def visit(
    residency: Residency,
    new: list[Column],
    old: list[Column],
    chunks: list[list[int]],
    run: Run,
    first: Callable[[], None],
) -> None:
    """Update one chunk after another, while the next one is read and the last one is written.

    Args:
        residency: reads and writes the leaves of its kinds.
        new: leaves of the new state, the parameters' first, then those of every slot of the optimizer.
        old: their values.
        chunks: the slices that are updated together.
        run: updates slices, given their indices and columns to write into, and returns what these become.
        first: is called before the first leaf is written.
    """
    parts = [_cut(residency.kinds, new, old, indices) for indices in chunks]
    if not parts:
        return first()
    reading: Callable[[], Any] = parts[0].read(residency)
    writing: Callable[[], Any] = _nothing
    try:
        for i, part in enumerate(parts):
            read, reading = reading(), _nothing
            if i + 1 < len(parts):
                reading = parts[i + 1].read(residency)
            if i == 0:
                first()
            columns = run(part.indices, part.worked(read))
            written, writing = writing, _nothing
            written()
            writing = part.write(residency, columns)
        writing()
    except BaseException:
        for wait in (reading, writing):  # nobody may write into this memory from here on
            with contextlib.suppress(Exception):
                wait()
        raise
    return None


@attrs.frozen(eq=False)
class Chunk:
    """Slices that are updated together: of parameters and of every slot of the optimizer a column of flat leaves."""

    indices: list[int]
    new: list[Column]  # the leaves of the new state
    elsewhere: list[tuple[int, int]]  # column and row of those that are read and written by a residency
    old: list[Tensor]  # their values
    device: torch.device  # on which these are updated

    def read(self, residency: Residency) -> Callable[[], list[Tensor]]:
        """Begin to read; return the function that waits."""
        wait = waiting(residency, "read", residency.read(self.old, self.device))
        return lambda: read_back(residency, wait(), self.old, self.device)

    def worked(self, read: list[Tensor]) -> list[Column]:
        """Return the columns for the optimizer to write into."""
        columns = [list(column) for column in self.new]
        for (column, row), x in zip(self.elsewhere, read, strict=True):
            columns[column][row] = x
        return columns

    def write(self, residency: Residency, columns: list[Column]) -> Callable[[], Any]:
        """Write what the optimizer returned, or begin to; return the function that waits."""
        elsewhere = set(self.elsewhere)
        for c, (column, leaves) in enumerate(zip(columns, self.new, strict=True)):
            for r, (x, leaf) in enumerate(zip(column, leaves, strict=True)):
                if x is not None and leaf is not None and x is not leaf and (c, r) not in elsewhere:
                    leaf.copy_(x)
        pairs = [(columns[c][r], self.new[c][r]) for c, r in self.elsewhere]
        worked, new = [x for x, _ in pairs if x is not None], [leaf for _, leaf in pairs if leaf is not None]
        return waiting(residency, "write", residency.write(worked, new))


def _cut(kinds: Collection[str], new: list[Column], old: list[Column], indices: list[int]) -> Chunk:
    """Return the slices with these indices of all columns, parameters first."""
    columns = [[column[i] for i in indices] for column in new]
    live = [c for c in range(len(new)) if ("opt" if c else "params") in kinds]
    elsewhere = [(c, r) for c in live for r, x in enumerate(columns[c]) if x is not None and x.numel()]
    values = [x.reshape(-1) for x in (old[c][indices[r]] for c, r in elsewhere) if x is not None]
    first = new[0][indices[0]]
    assert first is not None  # a parameter
    return Chunk(indices, columns, elsewhere, values, first.device)


def _nothing() -> None:
    """Wait for nothing."""
