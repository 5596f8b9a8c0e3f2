"""`Code`: how the numbers of a message become bytes. `Coded`: the transport that sends them so, on all of its legs."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from fds import random
from fds.collectives import Axis, Work
from fds.collectives.traffic import Expected
from fds.step import Leg, Pending, Transport


class Code:
    """How n numbers become a message of bytes, and what they are where it arrives.

    Attributes:
        bound: the largest error of a number, relative to the largest absolute value in its message.
        draws: whether numbers are rounded at random.
    """

    bound: float = 0.0
    draws: bool = False

    def seeded(self, seed: int) -> Code:
        """Return the code that draws what follows from a seed."""
        return self

    def num_bytes(self, n: int) -> int:
        """Return the bytes of a message of n numbers: a multiple of 4, so that each may begin with float32."""
        raise NotImplementedError

    def encode(self, numbers: Tensor, messages: Tensor) -> None:
        """Write every row of `numbers` (k, n), of any floating dtype, to its row of `messages` (k, num_bytes) uint8."""
        raise NotImplementedError

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Write the numbers of a `message` (num_bytes,) uint8 to `out` (n,), of any floating dtype."""
        raise NotImplementedError

    def encode_and_keep(self, numbers: Tensor, messages: Tensor, kept: Tensor | None) -> None:
        """Do what `encode` does; what each message loses is added to its row of `kept` (k, n) float32, if not None."""
        self.encode(numbers, messages)
        for x, message, error in zip(numbers, messages, () if kept is None else kept, strict=kept is not None):
            sent = torch.empty_like(x, dtype=torch.float32)
            self.decode(message, sent)
            error += torch.sub(x, sent, out=sent)

    def add_up(self, messages: Tensor, out: Tensor, own: Tensor, index: int) -> None:
        """Write to `out` (n,) the sum of `messages` (size, num_bytes), in float32 at least, in their order.

        What this rank has of its own (n,) stands in place of message `index`.
        """
        total = torch.empty_like(own, dtype=torch.promote_types(own.dtype, torch.float32))
        term = torch.empty_like(total)
        for r, message in enumerate(messages):
            into = term if r else total
            if r == index:
                into.copy_(own)
            else:
                self.decode(message, into)
            if r:
                total += term
        out.copy_(total)

    def exchange(self, axis: Axis, rows: Tensor, kept: Tensor | None) -> Arriving:
        """Begin to send row r of `rows` (size, n) to rank r of an axis, in a message; this rank's own stays here.

        What the messages lose is added to `kept` (size, n) float32, where there is one.
        """
        (k, n), at = rows.shape, axis.index
        messages = torch.zeros(k, self.num_bytes(n), dtype=torch.uint8, device=rows.device)
        for some in (slice(at), slice(at + 1, k)):
            self.encode_and_keep(rows[some], messages[some], None if kept is None else kept[some])
        arrived = torch.empty_like(messages)
        return Arriving(self, axis.start_all_to_all(arrived, messages), arrived, at, rows[at])

    def share(self, axis: Axis, own: Tensor, kept: Tensor | None) -> tuple[Work, Tensor]:
        """Begin to send `own` (n,) to all ranks of an axis; return the work, and their messages (size, num_bytes).

        What the message loses is added to `kept` (n,) float32, where there is one.
        """
        message = torch.empty(1, self.num_bytes(len(own)), dtype=torch.uint8, device=own.device)
        self.encode_and_keep(own[None], message, None if kept is None else kept[None])
        arrived = message.new_empty(axis.size * message.shape[1])
        return axis.start_all_gather(arrived, message[0]), arrived.view(axis.size, -1)


@attrs.frozen(eq=False)
class Arriving:
    """Messages on their way to a rank, one from each of the others, and its own numbers, which are exact."""

    code: Code
    work: Work
    messages: Tensor  # (size, num_bytes) uint8
    index: int  # of this rank
    own: Tensor  # (n,)

    def sum(self, out: Tensor | None = None) -> Tensor:
        """Return the sum (n,) of what all ranks sent, in their order, once `work` has arrived.

        It is in float32 at least, or written to `out`.
        """
        if out is None:
            out = torch.empty_like(self.own, dtype=torch.promote_types(self.own.dtype, torch.float32))
        self.code.add_up(self.messages, out, self.own, self.index)
        return out


@attrs.frozen(eq=False, repr=False)
class Coded(Transport):
    """Sends every bucket in messages of one code: to each rank its slice, and what is for all to all."""

    code: Code
    text: str  # how it was written
    keeps: bool = False

    @property
    def bound(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The largest error of a number in a message, relative to the largest absolute value in its bucket."""
        return self.code.bound

    @property
    def draws(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether its code draws."""
        return self.code.draws

    def seeded(self, key: Tensor) -> Coded:
        """Return the transport that draws from a key."""
        return attrs.evolve(self, code=self.code.seeded(random.seed(key)))

    def reduce(self, axis: Axis, whole: Tensor, out: Tensor, kept: Tensor | None) -> Work:
        """Send each rank its slice, coded; sum what arrives in float32, in the order of ranks."""
        rows = given(whole, kept).view(axis.size, -1)
        arriving = self.code.exchange(axis, rows, None if kept is None else kept.view(axis.size, -1))
        return Pending(arriving.work, lambda: arriving.sum(out))

    def combine(self, axis: Axis, own: Tensor, kept: Tensor | None) -> Work:
        """Sum a slice over its replicas in two messages: each sums a piece of it, and sends that to the others."""
        n, pieces = len(own), padded(own, axis.size)
        errors = None if kept is None else torch.zeros_like(pieces)
        arriving = self.code.exchange(axis, pieces, errors)

        def finish() -> None:
            work, messages = self.code.share(axis, arriving.sum(), None if errors is None else errors[axis.index])
            work.wait()
            for message, piece in zip(messages, pieces, strict=True):
                self.code.decode(message, piece)
            own.copy_(pieces.view(-1)[:n])
            if kept is not None and errors is not None:
                kept.add_(errors.view(-1)[:n])

        return Pending(arriving.work, finish)

    def spread(self, axis: Axis, own: Tensor, whole: Tensor, kept: Tensor | None) -> Work:
        """Send sums to all, coded; all decode the same messages, the sender too."""
        work, messages = self.code.share(axis, own, kept)
        return Pending(work, lambda: self._decode(messages, whole))

    def gather(self, axis: Axis, part: Tensor, whole: Tensor) -> Work:
        """Send parameters to all, coded; all decode the same messages, the sender too."""
        work, messages = self.code.share(axis, part, None)
        return Pending(work, lambda: self._decode(messages, whole))

    def bytes_sent(self, leg: Leg, numel: int, dtype: torch.dtype, size: int) -> float:
        """Return the bytes of the messages that a rank sends in a leg over `size` ranks."""
        if leg == "combine":
            return 2 * (size - 1) * self.code.num_bytes(-(-numel // size))
        return (size - 1) * self.code.num_bytes(numel // size)

    def messages(self, leg: Leg, axis: Axis, numel: int, dtype: torch.dtype) -> list[Expected]:
        """Return the messages of a leg: one to each rank, one to all, or for `combine` both."""
        n = -(-numel // axis.size) if leg == "combine" else numel
        each = Expected.of(axis, "all_to_all", axis.size * self.code.num_bytes(n), torch.uint8)
        to_all = Expected.of(axis, "all_gather", self.code.num_bytes(n), torch.uint8)
        return {"reduce": [each], "combine": [each, to_all]}.get(leg, [to_all])

    def _decode(self, messages: Tensor, whole: Tensor) -> None:
        for message, out in zip(messages, whole.view(len(messages), -1), strict=True):
            self.code.decode(message, out)

    def __repr__(self) -> str:
        return self.text


def given(x: Tensor, kept: Tensor | None) -> Tensor:
    """Return what a leg is given, with what was kept of it, which is 0 afterwards; float32 where something was."""
    if kept is None:
        return x
    total = kept + x
    kept.zero_()
    return total


def padded(x: Tensor, size: int) -> Tensor:
    """Return a copy of `x` (n,) as `size` rows, the last filled up with zeros."""
    columns = -(-len(x) // size)
    rows = x.new_zeros(size * columns)
    rows[: len(x)] = x
    return rows.view(size, columns)
