"""Send numbers in a narrower floating dtype, and sum what arrives in float32.

Bytes:  2 per number in 16 bits
Bound:  half a unit in the last place: 2^-8 in bfloat16, 2^-11 in float16 (which overflows beyond 65,504)
Keeps:  with `feedback`, 4 bytes per trained parameter
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from fds.errors import ComposeError
from fds.transports.code import Code, Coded

_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}


@attrs.frozen
class Cast(Code):
    """Numbers in another dtype."""

    dtype: torch.dtype

    @property
    def bound(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Half a unit in the last place."""
        return 2.0 ** -_BITS[self.dtype]

    def num_bytes(self, n: int) -> int:
        """Return the bytes of n numbers, a multiple of 4."""
        return -(-n * self.dtype.itemsize // 4) * 4

    def encode(self, numbers: Tensor, messages: Tensor) -> None:
        """Round every number to the nearest."""
        messages.view(self.dtype)[:, : numbers.shape[1]] = numbers

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Widen the numbers."""
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
