"""`Stream`: the rows of global batch i, as arithmetic on positions."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from fds.errors import DataError, did_you_mean

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
            raise DataError(
                "unknown way to end an epoch",
                where="last",
                got=repr(self.last),
                want=" or ".join(map(repr, LAST)),
                hint=did_you_mean(str(self.last), LAST),
            )
        if not self.used:
            raise DataError(
                "the data set does not fill one batch",
                got=f"{self.length} rows, batch_size={self.batch_size}",
                want="at least one batch" if self.length else "at least one row",
                hint='a smaller batch_size, or last="keep" or "wrap"' if self.length else "",
            )

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
