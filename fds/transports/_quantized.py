"""Send numbers as integers of 8 or 4 bits with one scale for each group: symmetric, rounded to the nearest.

Or, `stochastic`, rounded up or down with the probability that keeps the mean.

    scale = max |x| / L over a group, L = 127 or 7;  q = round(x / scale);  sent = scale * q

Bytes:  bits / 8 per number, and 4 for each group
Bound:  1 / (2 L) of the largest absolute value in the group: 1/254, 1/14; stochastic: 1 / L
Keeps:  with `feedback`, 4 bytes per trained parameter
Source: Wang et al. 2023 (ZeRO++), arXiv:2306.10209, section 3
"""

from __future__ import annotations

import attrs
from torch import Tensor

from fds import kernels
from fds.errors import ComposeError, is_int
from fds.kernels.messages.groups import LEVELS
from fds.transports.code import Code, Coded


@attrs.frozen
class Quantized(Code):
    """Integers of some bits, with a float32 scale for each group."""

    bits: int
    group: int
    stochastic: bool = False
    seed: int | None = None  # of this call

    @property
    def bound(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Half a level, or a whole one, and the rounding of float32."""
        return (0.5 + self.stochastic * 0.5 + 2.0**-15) / LEVELS[self.bits]

    @property
    def draws(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether numbers are rounded at random."""
        return self.stochastic

    def seeded(self, seed: int) -> Quantized:
        """Return the code that draws what follows from a seed."""
        return attrs.evolve(self, seed=seed)

    def num_bytes(self, n: int) -> int:
        """Return the bytes of n numbers in whole groups, and of their scales."""
        return -(-n // self.group) * (4 + self.group * self.bits // 8)

    def encode(self, numbers: Tensor, messages: Tensor) -> None:
        """Write the scales of a message, then its integers."""
        self.encode_and_keep(numbers, messages, None)

    def encode_and_keep(self, numbers: Tensor, messages: Tensor, kept: Tensor | None) -> None:
        """Write a message and what it loses in one pass."""
        kernels.quantize(numbers, messages, bits=self.bits, group=self.group, seed=self.seed, kept=kept)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Multiply integers by their scales."""
        kernels.dequantize(message, out, bits=self.bits, group=self.group)

    def add_up(self, messages: Tensor, out: Tensor, own: Tensor, index: int) -> None:
        """Sum messages as they are."""
        kernels.sum_messages(messages, out, bits=self.bits, group=self.group, own=own, index=index)


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
    return Coded(Quantized(bits, group, bool(stochastic)), f"quantized({bits}{more})", bool(feedback))
