"""How numbers become bytes, and the transport that sends them so: `cast`, `onebit`, `quantized`, `topk`."""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

from fds import kernels, random
from fds.collectives import Axis, Work
from fds.collectives.traffic import Expected
from fds.errors import ComposeError, is_int, is_number
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
        for others in (slice(at), slice(at + 1, k)):
            self.encode_and_keep(rows[others], messages[others], None if kept is None else kept[others])
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

    def spread(self, axis: Axis, own: Tensor, whole: Tensor, kept: Tensor | None) -> Work:
        """Begin to share `own` (n,); all decode the same messages into `whole` (size * n,), the sender too."""
        work, messages = self.share(axis, own, kept)
        return Pending(work, lambda: self.decode_all(messages, whole))

    def decode_all(self, messages: Tensor, whole: Tensor) -> None:
        """Write the numbers of all messages (size, num_bytes) to `whole` (size * n,), in their order."""
        for message, out in zip(messages, whole.view(len(messages), -1), strict=True):
            self.decode(message, out)


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
        return self.code.bound

    @property
    def draws(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.code.draws

    def seeded(self, key: Tensor) -> Coded:
        return attrs.evolve(self, code=self.code.seeded(random.seed(key)))

    def reduce(self, axis: Axis, whole: Tensor, out: Tensor, kept: Tensor | None) -> Work:
        """Send each rank its slice, coded; sum what arrives in float32, in the order of ranks."""
        rows = add_kept(whole, kept).view(axis.size, -1)
        arriving = self.code.exchange(axis, rows, None if kept is None else kept.view(axis.size, -1))
        return Pending(arriving.work, lambda: arriving.sum(out))

    def combine(self, axis: Axis, own: Tensor, kept: Tensor | None) -> Work:
        """Sum a slice over its replicas in two messages: each sums a piece of it, and sends that to the others."""
        n, pieces = len(own), padded(own, axis.size)
        errors = None if kept is None else torch.zeros_like(pieces)
        arriving = self.code.exchange(axis, pieces, errors)

        def finish() -> None:
            self.code.spread(axis, arriving.sum(), pieces, None if errors is None else errors[axis.index]).wait()
            own.copy_(pieces.view(-1)[:n])
            if kept is not None and errors is not None:
                kept.add_(errors.view(-1)[:n])

        return Pending(arriving.work, finish)

    def spread(self, axis: Axis, own: Tensor, whole: Tensor, kept: Tensor | None) -> Work:
        """Send sums to all, coded."""
        return self.code.spread(axis, own, whole, kept)

    def gather(self, axis: Axis, part: Tensor, whole: Tensor) -> Work:
        return self.code.spread(axis, part, whole, None)

    def bytes_sent(self, leg: Leg, numel: int, dtype: torch.dtype, size: int) -> float:
        if leg == "combine":
            return 2 * (size - 1) * self.code.num_bytes(-(-numel // size))
        return (size - 1) * self.code.num_bytes(numel // size)

    def messages(self, leg: Leg, axis: Axis, numel: int, dtype: torch.dtype) -> list[Expected]:
        """Return the messages of a leg: one to each rank, one to all, or for `combine` both."""
        n = -(-numel // axis.size) if leg == "combine" else numel
        each = Expected.of(axis, "all_to_all", axis.size * self.code.num_bytes(n), torch.uint8)
        to_all = Expected.of(axis, "all_gather", self.code.num_bytes(n), torch.uint8)
        return {"reduce": [each], "combine": [each, to_all]}.get(leg, [to_all])

    def __repr__(self) -> str:
        return self.text


def add_kept(x: Tensor, kept: Tensor | None) -> Tensor:
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


_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}


@attrs.frozen
class Cast(Code):
    """Send numbers in a narrower floating dtype, and sum what arrives in float32.

    Bytes:  2 per number in 16 bits
    Bound:  half a unit in the last place: 2^-8 in bfloat16, 2^-11 in float16 (which overflows beyond 65,504)
    Keeps:  with `feedback`, 4 bytes per trained parameter
    """

    dtype: torch.dtype

    @property
    def bound(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 2.0 ** -_BITS[self.dtype]

    def num_bytes(self, n: int) -> int:
        return -(-n * self.dtype.itemsize // 4) * 4

    def encode(self, numbers: Tensor, messages: Tensor) -> None:
        messages.view(self.dtype)[:, : numbers.shape[1]] = numbers

    def decode(self, message: Tensor, out: Tensor) -> None:
        out.copy_(message.view(self.dtype)[: len(out)])


def cast(dtype: torch.dtype, *, feedback: bool = False) -> Coded:
    """Send messages in `dtype`, bfloat16, float16 or float32, whatever they are summed in.

    `fds.precision(reduce=...)` also sums in that dtype where the collective does (NCCL); here sums are of float32, over
    messages that were rounded once. With `feedback` what a message of gradients lost is added to the next one.

    Raises `ComposeError` for another dtype.
    """
    if dtype not in _BITS:
        raise ComposeError(
            "cast: messages cannot be sent in this dtype",
            got=repr(dtype),
            want="torch.bfloat16, torch.float16 or torch.float32",
            hint="fds.transports.quantized(8) sends bytes",
        )
    return Coded(Cast(dtype), f"cast({dtype}{', feedback=True' if feedback else ''})", bool(feedback))


@attrs.frozen
class Grouped(Code):
    """A few bits for each number, and a float32 scale for each group."""

    group: int
    bits: int

    def num_bytes(self, n: int) -> int:
        return -(-n // self.group) * (4 + self.group * self.bits // 8)

    def encode(self, numbers: Tensor, messages: Tensor) -> None:
        self.encode_and_keep(numbers, messages, None)

    def decode(self, message: Tensor, out: Tensor) -> None:
        kernels.dequantize(message, out, bits=self.bits, group=self.group)

    def add_up(self, messages: Tensor, out: Tensor, own: Tensor, index: int) -> None:
        kernels.sum_messages(messages, out, bits=self.bits, group=self.group, own=own, index=index)


@attrs.frozen
class OneBit(Grouped):
    """Send the sign of every number, and one scale for each group; what that loses is sent later (error feedback).

        scale = mean |x| over a group;  sent = scale where x >= 0, else -scale

    Bytes:  1/8 per number, and 4 for each group
    Bound:  the largest absolute value: an error is at most that
    Keeps:  4 bytes per trained parameter, the worker's error and, at stage 0, in this rank's slice the server's
    Source: Seide et al. 2014; Tang et al. 2021 (1-bit Adam), arXiv:2102.02888, section 4; Karimireddy et al. 2019,
            arXiv:1901.09847 (the mean as scale)
    """

    bits: int = 1
    bound = 1.0

    def encode_and_keep(self, numbers: Tensor, messages: Tensor, kept: Tensor | None) -> None:
        kernels.pack_signs(numbers, messages, group=self.group, kept=kept)


def onebit(*, group: int = 2048) -> Coded:
    """Send one bit for every number, and a float32 scale for every `group` numbers in a row; keep what is lost.

    Gradients are sent twice at stage 0, to the rank that sums a slice and from there to all; what either message loses
    goes into the next one of that rank. It suits gradients that change slowly, after some steps without it.

    Raises `ComposeError` for a group that is not a multiple of 32 numbers.
    """
    if not is_int(group, 32) or group % 32:
        raise ComposeError("onebit: not a size of groups", got=f"group={group!r}", want="a multiple of 32, 2048 say")
    return Coded(OneBit(group), f"onebit({f'group={group}' if group != 2048 else ''})", True)


@attrs.frozen
class Quantized(Grouped):
    """Send numbers as integers of 8 or 4 bits with one scale for each group: symmetric, rounded to the nearest.

    Or, `stochastic`, rounded up or down with the probability that keeps the mean.

        scale = max |x| / L over a group, L = 127 or 7;  q = round(x / scale);  sent = scale * q

    Bytes:  bits / 8 per number, and 4 for each group
    Bound:  1 / (2 L) of the largest absolute value in the group: 1/254, 1/14; stochastic: 1 / L
    Keeps:  with `feedback`, 4 bytes per trained parameter
    Source: Wang et al. 2023 (ZeRO++), arXiv:2306.10209, section 3
    """

    stochastic: bool = False
    seed: int | None = None  # of this call

    @property
    def bound(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (0.5 + self.stochastic * 0.5 + 2.0**-15) / (
            2 ** (self.bits - 1) - 1
        )  # a level or half, and float32's rounding

    @property
    def draws(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.stochastic

    def seeded(self, seed: int) -> Quantized:
        return attrs.evolve(self, seed=seed)

    def encode_and_keep(self, numbers: Tensor, messages: Tensor, kept: Tensor | None) -> None:
        kernels.quantize(numbers, messages, bits=self.bits, group=self.group, seed=self.seed, kept=kept)


def quantized(bits: int = 8, *, group: int = 256, stochastic: bool = False, feedback: bool = False) -> Coded:
    """Send integers of `bits` bits, 8 or 4, with one float32 scale for every `group` numbers in a row.

    With `stochastic` gradients are rounded up or down at random, by the key of the state, so that the mean over calls
    is right: errors of many calls cancel. With `feedback` what a message of gradients lost is added to the next one. A
    group in which a number is not finite arrives as NaN, so that a step is skipped by all ranks or by none.

    Raises `ComposeError` for other bits, and a group that is not a multiple of 8 numbers.
    """
    if bits not in (8, 4) or isinstance(bits, bool):
        raise ComposeError("quantized: numbers of 8 or 4 bits are sent", got=f"bits={bits!r}", want="8 or 4")
    if not is_int(group, 8) or group % 8:
        raise ComposeError("quantized: not a size of groups", got=f"group={group!r}", want="a multiple of 8, 256 say")
    more = f", group={group}" if group != 256 else ""
    more += (", stochastic=True" if stochastic else "") + (", feedback=True" if feedback else "")
    return Coded(Quantized(group, bits, bool(stochastic)), f"quantized({bits}{more})", bool(feedback))


@attrs.frozen
class TopK(Code):
    """Send the largest numbers of a message with their places; the others are kept, and sent when they have grown.

    A message is int32 indices, then float32 numbers; NaN is larger than any.

    Bytes:  8 per number that is sent, at least one of every message
    Bound:  the largest absolute value: an error is at most that
    Keeps:  4 bytes per trained parameter
    Source: Lin et al. 2018 (deep gradient compression), arXiv:1712.01887; Stich et al. 2018, arXiv:1809.07599
    """

    fraction: float
    bound = 1.0

    def count(self, n: int) -> int:
        """Return how many of n numbers are sent."""
        return min(n, max(1, math.ceil(self.fraction * n)))

    def num_bytes(self, n: int) -> int:
        return 8 * self.count(n)

    def encode(self, numbers: Tensor, messages: Tensor) -> None:
        k = self.count(numbers.shape[1])
        for row, message in zip(numbers.float(), messages, strict=True):
            at = row.abs().topk(k, sorted=False).indices
            message[: 4 * k].view(torch.int32).copy_(at)
            message[4 * k :].view(torch.float32).copy_(row[at])

    def decode(self, message: Tensor, out: Tensor) -> None:
        at, values = message.view(2, -1)
        out.zero_()[at.view(torch.int32).long()] = values.view(torch.float32).to(out.dtype)


def topk(fraction: float) -> Coded:
    """Send this fraction of the numbers of every message, those of the largest absolute value; keep the others.

    Raises `ComposeError` for a fraction that is not above 0 and at most 1.
    """
    if not (is_number(fraction) and 0 < fraction <= 1):
        raise ComposeError(
            "topk: not a fraction of the numbers", got=repr(fraction), want="above 0, at most 1: 0.01 say"
        )
    return Coded(TopK(float(fraction)), f"topk({fraction:g})", True)
