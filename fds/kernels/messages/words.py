"""Words of 32 bits, in which kernels read and write codes: how many of them a program has, and which groups fit."""

from __future__ import annotations

from fds.errors import KernelError
from fds.kernels.choice import is_demanded
from fds.kernels.language import jit, next_power_of_2, tl

ELEMENTS = 2048  # numbers of a program, where groups are not larger: 16 for each thread (derived, not measured)
MOST = 8192  # numbers of a group, of which a program that writes a message holds all in its registers


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
