"""How numbers become bytes: narrower dtypes, integers or signs in groups with a scale each, the largest numbers."""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

from fds import kernels
from fds.errors import ComposeError, is_int, is_number
from fds.kernels.messages.groups import LEVELS
from fds.transports.code import Code, Coded

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
        return (0.5 + self.stochastic * 0.5 + 2.0**-15) / LEVELS[self.bits]  # a level or half, and float32's rounding

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
    if bits not in LEVELS or isinstance(bits, bool):
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
