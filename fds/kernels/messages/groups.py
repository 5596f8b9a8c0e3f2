"""Rows of numbers in groups, each of which a message gives a scale: where scales and codes of a group lie."""

from __future__ import annotations

import torch
from torch import Tensor

from fds.errors import KernelError


def opened(messages: Tensor, n: int, *, group: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return the scales (k, g) float32 and the codes (k, g, group * bits / 8) uint8 in messages (k, m) of n numbers.

    A message is the scales of its groups, then their codes; the last group may have fewer numbers than `group`, and
    room for all. Raises `KernelError` for messages of another size.
    """
    count, each = -(-n // group), group * bits // 8
    if messages.shape[1] != count * (4 + each):
        raise KernelError(
            "a message of another size",
            where="messages",
            got=f"{messages.shape[1]} bytes",
            want=f"{count * (4 + each)} bytes for {n} numbers in groups of {group}, {bits} bits each",
        )
    scales = messages[:, : 4 * count].view(torch.float32)
    return scales, messages[:, 4 * count :].unflatten(1, (count, each))


def parts(numbers: Tensor, group: int) -> list[tuple[slice, Tensor]]:
    """Return the groups (k, g, group) of rows `numbers` (k, n), and which they are: a view of all full ones.

    The last one, if it is not full, is a part of its own: a copy, filled up with zeros.
    """
    k, n = numbers.shape
    full = n // group
    found = [(slice(0, full), numbers[:, : full * group].unflatten(1, (full, group)))] if full else []
    if n % group:
        last = numbers.new_zeros(k, 1, group)
        last[:, 0, : n % group] = numbers[:, full * group :]
        found.append((slice(full, full + 1), last))
    return found
