"""Rows of numbers in groups, each of which a message gives a scale: where scales and codes of a group lie.

A message is the scales of its groups, float32, then their codes, 8, 4 or 1 bits for each number, in words of 32 bits::

    8 bits  number 4 w + j of a group is byte j of its word w
    4 bits  byte b of a group has number b in its low bits, and number group / 2 + b above
    1 bit   number 32 w + j is bit j of word w

The last group of a row may have fewer numbers than `group`; its message has room for all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fds.errors import KernelError
from fds.kernels.choice import is_demanded
from fds.kernels.language import jit, next_power_of_2, tl

LEVELS = {8: 127, 4: 7}  # the largest integer of so many bits
BLOCK = 2**17  # numbers that a reference works on at a time: what it makes of them stays in a cache
ELEMENTS = 2048  # numbers of a program, where groups are not larger: 16 for each thread (derived, not measured)
MOST = 8192  # numbers of a group, of which a program that writes a message holds all in its registers


def opened(messages: Tensor, n: int, *, group: int, bits: int) -> tuple[Tensor, Tensor]:
    """Return the scales (k, g) float32 and the codes (k, g, group * bits / 8) uint8 in messages (k, m) of n numbers.

    Raises `KernelError` for messages of another size, and groups that are not whole words of 32 bits.
    """
    if group * bits % 32 or group <= 0:
        raise KernelError(
            "the codes of a group are not whole words",
            where="group",
            got=str(group),
            want=f"a multiple of {32 // bits}",
        )
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


def blocks(k: int, n: int, group: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield rows of k, groups, and the columns of their numbers; a group that is not full in a block of its own.

    A block is some groups of one row, or whole rows where they are short: it lies in one piece.
    """
    rows, groups, full = max(1, BLOCK // max(n, 1)), max(1, BLOCK // group), n // group
    for line in (slice(r, r + rows) for r in range(0, k, rows)):
        for first in range(0, full, groups):
            last = min(first + groups, full)
            yield line, slice(first, last), slice(first * group, last * group)
        if n % group:
            yield line, slice(full, full + 1), slice(full * group, n)


def grouped(x: Tensor, group: int) -> Tensor:
    """Return the numbers of a block (k, n) in their groups (k, g, group): a copy with zeros where one is not full."""
    if x.shape[1] % group:
        x = torch.nn.functional.pad(x, (0, group - x.shape[1]))
    return x.unflatten(1, (-1, group))


def fits(group: int) -> bool:
    """Return whether a program that writes a message holds such a group; references write larger ones.

    Raises `KernelError` for larger ones inside `only("triton")`.
    """
    if group > MOST and is_demanded():
        raise KernelError("a group exceeds a block", where="group", got=str(group), want=f"at most {MOST}")
    return group <= MOST


def tile(bits: int, group: int, most: int) -> dict[str, int]:
    """Return ROWS, groups of a program, and WORDS, of each of them (`most` numbers at the most), and num_warps."""
    numbers = min(next_power_of_2(group), most)
    return {
        "BITS": bits, "ROWS": max(1, ELEMENTS // numbers), "WORDS": numbers * bits // 32,
        "num_warps": 4 if numbers <= ELEMENTS else 8,
    }  # fmt: skip


@jit
def place(word, group, BITS: tl.constexpr):
    """Return which numbers of a group some words (1, WORDS) have, and by how many bits they are shifted.

    Both are (1, WORDS, 32 / BITS).
    """
    j = tl.arange(0, 32 // BITS)[None, None, :]
    if BITS == 4:
        return word[:, :, None] * 4 + j % 4 + j // 4 * (group // 2), j % 4 * 8 + j // 4 * 4
    return word[:, :, None] * (32 // BITS) + j, j * BITS
