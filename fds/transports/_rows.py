"""Send the rows of a gradient that are not 0, with their numbers: of an embedding those that a batch looked up.

    message = numbers of rows (n,) int32, then these rows (n, width), in the dtype of the gradient

What arrives is the sum of whole gradients, bit for bit where those are added in the order of ranks.

Bytes:  4 + width * itemsize for a row; where that is no less than whole gradients take, those are sent
Bound:  0
Keeps:  nothing
Source: Aji and Heafield 2017, arXiv:1704.05021, section 3; Kim et al. 2019 (Parallax), arXiv:1808.02621 (the choice)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import attrs
import torch
from torch import Tensor

from fds import reading
from fds.collectives import Axis, Work
from fds.collectives.traffic import Expected
from fds.errors import ComposeError, is_int
from fds.layout import Bucket
from fds.step import Leg, Pending, Relay, Transport
from fds.step.sharding.transport import LOSSLESS
from fds.transports._code import Arriving, Code

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen
class NumberedRows(Code):
    """The rows of a message that are not 0, in as many places as there is room for."""

    width: int  # numbers of a row
    room: int  # rows of a message
    dtype: torch.dtype

    def count(self, n: int) -> int:
        """Return how many rows a message of n numbers has places for: a multiple of 4, so that all of it is aligned."""
        return -(-min(self.room, n // self.width) // 4) * 4

    def num_bytes(self, n: int) -> int:
        return self.count(n) * (4 + self.width * self.dtype.itemsize)

    def encode(self, numbers: Tensor, messages: Tensor) -> None:
        """Write the rows that are not 0, and the first of them in places left over; NaN where there are too few."""
        for row, message in zip(numbers, messages, strict=True):
            rows = row.view(-1, self.width)
            at, values = self._parts(message, len(row))
            used = used_rows(rows)
            place = used.cumsum(0)  # from 1
            first = used.to(torch.uint8).argmax()  # 0 where all rows are 0
            index = first.to(torch.int32).repeat(len(at) + 1)
            index[torch.where(used & (place <= len(at)), place - 1, len(at))] = torch.arange(
                len(rows), dtype=torch.int32, device=rows.device
            )
            at.copy_(index[:-1])
            values.copy_(rows.index_select(0, at))
            values.masked_fill_(place[-1] > len(at), math.nan)

    def decode(self, message: Tensor, out: Tensor) -> None:
        at, values = self._parts(message, len(out))
        out.zero_().view(-1, self.width)[at.long()] = values.to(out.dtype)

    def _parts(self, message: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return the numbers of the rows in a message, and the rows."""
        end = 4 * self.count(n)
        return message[:end].view(torch.int32), message[end:].view(self.dtype).view(-1, self.width)


@attrs.frozen(eq=False, repr=False)
class Rows(Transport):
    """Sends the rows that are not 0 where that is fewer bytes, else all: in a bucket of one parameter."""

    most: int | None
    bucket: Bucket | None = None
    ranks: int = 1  # over which gradients are summed in all

    def grouping(self, name: str, shape: tuple[int, ...]) -> tuple[Hashable, int]:
        """Give a parameter with rows a bucket of its own, in slices of whole rows."""
        width = math.prod(shape[1:])
        return (name, width) if width > 1 else (None, 1)

    def of(self, bucket: Bucket, data: Axis) -> Transport:
        return attrs.evolve(self, bucket=bucket, ranks=data.size) if bucket.leaves[0].unit > 1 else LOSSLESS

    def reduce(self, axis: Axis, whole: Tensor, out: Tensor, kept: Tensor | None) -> Work:
        """Send each rank the rows of its slice; add what arrives in the order of ranks."""
        pieces = whole.view(axis.size, -1)

        def by_rows(code: Code) -> Work:
            arriving = code.exchange(axis, pieces, None)
            return Pending(arriving.work, lambda: out.copy_(arriving.sum()))

        return self._send("reduce", axis, pieces, by_rows, lambda: LOSSLESS.reduce(axis, whole, out, None))

    def combine(self, axis: Axis, own: Tensor, kept: Tensor | None) -> Work:
        """Send the rows of a slice of sums to all replicas, which add them in their order."""

        def by_rows(code: Code) -> Work:
            work, messages = code.share(axis, own, None)
            return Pending(work, lambda: own.copy_(Arriving(code, work, messages, axis.index, own).sum()))

        return self._send("combine", axis, own[None], by_rows, lambda: LOSSLESS.combine(axis, own, None))

    def spread(self, axis: Axis, own: Tensor, whole: Tensor, kept: Tensor | None) -> Work:
        by_rows = lambda code: code.spread(axis, own, whole, None)
        return self._send("spread", axis, own[None], by_rows, lambda: LOSSLESS.spread(axis, own, whole, None))

    def bytes_sent(self, leg: Leg, numel: int, dtype: torch.dtype, size: int) -> float:
        dense = LOSSLESS.bytes_sent(leg, numel, dtype, size)
        if self.bucket is None or leg == "gather":
            return dense
        if self.most is None:
            return dense + 8 * (size - 1)  # at most: ranks may send fewer rows
        code = self._code(leg, self._room(leg), dtype, size)
        return dense if code is None else (size - 1) * code.num_bytes(self.bucket.length)

    def messages(self, leg: Leg, axis: Axis, numel: int, dtype: torch.dtype) -> list[Expected]:
        """Return the messages of a leg; of one in which rows are counted, none."""
        if self.most is None and self.bucket is not None and leg != "gather":
            return []
        code = None if leg == "gather" else self._code(leg, self._room(leg), dtype, axis.size)
        if code is None:
            return LOSSLESS.messages(leg, axis, numel, dtype)
        num_bytes = code.num_bytes(numel)
        if leg == "reduce":
            return [Expected.of(axis, "all_to_all", axis.size * num_bytes, torch.uint8)]
        return [Expected.of(axis, "all_gather", num_bytes, torch.uint8)]

    def _send(
        self, leg: Leg, axis: Axis, pieces: Tensor, by_rows: Callable[[Code], Work], whole: Callable[[], Work]
    ) -> Work:
        """Begin a leg of messages of `pieces` (k, n), by rows or whole; where rows are counted, once all ranks have."""

        def begin(room: int) -> Work:
            code = self._code(leg, room, pieces.dtype, axis.size)
            return whole() if code is None else by_rows(code)

        if self.bucket is None:
            return whole()
        if self.most is not None:
            return begin(self._room(leg))
        if not reading.is_free(pieces):  # the host would wait for a GPU
            return whole()
        counts = used_rows(pieces.view(len(pieces), -1, self.bucket.leaves[0].unit)).sum(1)
        if leg == "reduce":
            counts[axis.index] = 0  # of what stays here
        largest = counts.max()[None]
        return Relay(axis.start_all_reduce(largest, "max"), lambda: begin(max(1, int(largest))))

    def _room(self, leg: Leg) -> int:
        """Return how many rows may be in a message of a leg: those of one rank, or of all that were summed by then."""
        if self.most is None or self.bucket is None:
            return 0
        return self.most * {"reduce": 1, "combine": self.bucket.num_ranks}.get(leg, self.ranks)

    def _code(self, leg: Leg, room: int, dtype: torch.dtype, size: int) -> NumberedRows | None:
        """Return how a message of so many rows is coded, None where whole gradients are no more bytes."""
        if self.bucket is None:
            return None
        code, n = NumberedRows(self.bucket.leaves[0].unit, room, dtype), self.bucket.length
        whole = LOSSLESS.bytes_sent(leg, n if leg == "combine" else n * size, dtype, size)
        return code if (size - 1) * code.num_bytes(n) < whole else None

    def __repr__(self) -> str:
        return "rows()" if self.most is None else f"rows(most={self.most})"


def used_rows(x: Tensor) -> Tensor:
    """Return which rows of `x` (..., width) have bits that are not 0, bool (...): a sum, NaN and -0.0 do not hide one.

    >>> used_rows(torch.tensor([[1.0, -1.0], [0.0, 0.0], [0.0, -0.0]]))
    tensor([ True, False,  True])
    """
    return x.view(_BITS[x.dtype.itemsize]).any(-1)


def rows(*, most: int | None = None) -> Rows:
    """Send of a gradient (V, ...) the rows that are not 0, or all of it where that is fewer bytes: the same sum.

    It is for embeddings, of which a batch looks up few rows, `nn.Embedding(sparse=True)` or not; what is tied to a
    head has no such rows, and is sent whole. Give it to some parameters, each of which then has a bucket of its own:
    `shard_optimizer(axis, gradients={"*embed*": fds.transports.rows()})`.

    Args:
        most: None: in every call ranks tell each other how many rows they have (8 bytes), then send as many, or all.
            For that the host reads a number, which it would have to wait for on a GPU: there gradients are sent whole.
            An int: every message has room for that many rows of a rank, and nobody reads or waits for anything. It is
            the number of ids that a rank looks up between two messages: in a call at stages 0 and 1, in a microbatch
            at 2 and 3. If more rows come, they arrive as NaN at all ranks, as any gradient that is not finite does.

    Raises `ComposeError` for a number of rows below 1.
    """
    if most is not None and not is_int(most, 1):
        raise ComposeError("rows: not a number of rows", got=f"most={most!r}", want="an int >= 1, or None")
    return Rows(most)
