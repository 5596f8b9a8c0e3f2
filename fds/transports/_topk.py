"""Send the largest numbers of a message with their places; the others are kept, and sent when they have grown.

Bytes:  8 per number that is sent, at least one of every message
Bound:  the largest absolute value: an error is at most that
Keeps:  4 bytes per trained parameter
Source: Lin et al. 2018 (deep gradient compression), arXiv:1712.01887; Stich et al. 2018, arXiv:1809.07599
"""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

from fds.errors import ComposeError, is_number
from fds.transports.code import Code, Coded


@attrs.frozen
class TopK(Code):
    """The largest absolute values of each message, float32, after their indices, int32."""

    fraction: float
    bound = 1.0

    def count(self, n: int) -> int:
        """Return how many of n numbers are sent."""
        return min(n, max(1, math.ceil(self.fraction * n)))

    def num_bytes(self, n: int) -> int:
        """Return the bytes of those of n numbers that are sent, and of their indices."""
        return 8 * self.count(n)

    def encode(self, numbers: Tensor, messages: Tensor) -> None:
        """Choose the largest numbers of every row; NaN is larger than any."""
        k = self.count(numbers.shape[1])
        for row, message in zip(numbers.float(), messages, strict=True):
            at = row.abs().topk(k, sorted=False).indices
            message[: 4 * k].view(torch.int32).copy_(at)
            message[4 * k :].view(torch.float32).copy_(row[at])

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Put the numbers into their places, zeros into the others."""
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
