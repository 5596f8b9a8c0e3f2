"""Send the sign of every number, and one scale for each group; what that loses is sent later (error feedback).

    scale = mean |x| over a group;  sent = scale where x >= 0, else -scale

Bytes:  1/8 per number, and 4 for each group
Bound:  the largest absolute value: an error is at most that
Keeps:  4 bytes per trained parameter, the worker's error and, at stage 0, in this rank's slice the server's
Source: Seide et al. 2014; Tang et al. 2021 (1-bit Adam), arXiv:2102.02888, section 4; Karimireddy et al. 2019,
        arXiv:1901.09847 (the mean as scale)
"""

from __future__ import annotations

import attrs
from torch import Tensor

from fds import kernels
from fds.errors import ComposeError, is_int
from fds.transports.code import Code, Coded


@attrs.frozen
class OneBit(Code):
    """Signs, with a float32 scale for each group."""

    group: int
    bound = 1.0

    def num_bytes(self, n: int) -> int:
        """Return the bytes of the signs of n numbers in whole groups, and of their scales."""
        return -(-n // self.group) * (4 + self.group // 8)

    def encode(self, numbers: Tensor, messages: Tensor) -> None:
        """Write the scales of a message, then its signs, eight to a byte."""
        self.encode_and_keep(numbers, messages, None)

    def encode_and_keep(self, numbers: Tensor, messages: Tensor, kept: Tensor | None) -> None:
        """Write a message and what it loses in one pass."""
        kernels.pack_signs(numbers, messages, group=self.group, kept=kept)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Give every sign its scale."""
        kernels.unpack_signs(message, out, group=self.group)

    def add_up(self, messages: Tensor, out: Tensor, own: Tensor, index: int) -> None:
        """Sum messages as they are."""
        kernels.sum_messages(messages, out, bits=1, group=self.group, own=own, index=index)


def onebit(*, group: int = 2048) -> Coded:
    """Send one bit for every number, and a float32 scale for every `group` numbers in a row; keep what is lost.

    Gradients are sent twice at stage 0, to the rank that sums a slice and from there to all; what either message loses
    goes into the next one of that rank. It suits gradients that change slowly, after some steps without it.

    Raises `ComposeError` for a group that is not a multiple of 32 numbers.
    """
    if not is_int(group, 32) or group % 32:
        raise ComposeError("onebit: not a size of groups", got=f"group={group!r}", want="a multiple of 32, 2048 say")
    return Coded(OneBit(group), f"onebit({f'group={group}' if group != 2048 else ''})", True)
