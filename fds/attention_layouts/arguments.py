"""What patterns take: checks of numbers, kinds of attention and ranges of blocks, which draw the fault."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fds.errors import FLAG, AttentionLayoutError, count, is_a, is_int

BIDIRECTIONAL, UNIDIRECTIONAL = "bidirectional", "unidirectional"


def check(function: str, least: int = 1, **numbers: Any) -> None:
    """Raise `AttentionLayoutError` for a number, by its name, that is no integer of at least `least`."""
    for name, number in numbers.items():
        count(least=least, where=name).check(function, name, number, AttentionLayoutError)


def check_flags(function: str, **flags: Any) -> None:
    """Raise `AttentionLayoutError` for what, by its name, is neither True nor False."""
    for name, flag in flags.items():
        FLAG.check(function, name, flag, AttentionLayoutError)


def as_array(function: str, numbers: Any, want: str) -> NDArray[Any]:
    """Return numbers, or a tensor on any device, as an array. Raises `AttentionLayoutError` for what is none."""
    try:
        array = np.asarray(numbers.detach().cpu() if is_a(numbers, Tensor) else numbers)
    except (TypeError, ValueError) as error:  # of a dtype that NumPy does not have; lists of several lengths
        raise AttentionLayoutError(
            f"{function}: not an array", where=function, got=str(error)[:80], want=want
        ) from error
    if array.dtype.kind not in "biuf":
        raise AttentionLayoutError(f"{function}: not numbers", where=function, got=str(array.dtype), want=want)
    return array


def check_attention(function: str, attention: Any, sees_all: Any = False) -> None:
    """Raise `AttentionLayoutError` for a kind of attention that there is not, or in which no block may see all."""
    if attention not in (BIDIRECTIONAL, UNIDIRECTIONAL):
        raise AttentionLayoutError(
            f"{function}: there is no such attention",
            where="attention",
            got=repr(attention)[:80],
            want=f"{BIDIRECTIONAL!r} or {UNIDIRECTIONAL!r}",
        )
    if sees_all and attention == UNIDIRECTIONAL:
        raise AttentionLayoutError(
            f"{function}: global blocks see all blocks, also those after them",
            where="horizontal_global_attention",
            got="True where unidirectional",
            want="False",
            hint="attention='bidirectional'",
        )


def check_within(function: str, name: str, blocks: int, number: int) -> None:
    """Raise `AttentionLayoutError`, with a picture, for more blocks of a row than it has."""
    if number > blocks:
        raise AttentionLayoutError(
            f"{function}: a row has fewer blocks",
            where=name,
            got=f"{number}\n{_ruler(blocks, number - 1)}",
            want=f"at most {blocks}",
        )


def integers(function: str, name: str, numbers: Any, least: int) -> NDArray[np.int64]:
    """Return numbers as an array. Raises `AttentionLayoutError` for what is no list of integers >= least."""
    if not isinstance(numbers, list | tuple) or not all(is_int(x, least) for x in numbers):
        raise AttentionLayoutError(
            f"{function}: {name} lists numbers of blocks",
            where=name,
            got=repr(numbers)[:80],
            want=f"a list of ints >= {least}",
        )
    return np.array(numbers, dtype=np.int64)


def ranges(function: str, blocks: int, indices: Any, stops: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where ranges of global blocks begin and end.

    Raises `AttentionLayoutError`, with a picture, for ranges without an end, empty ones, and blocks beyond the last.
    """
    begins = integers(function, "global_block_indices", indices, 0)
    ends = begins + 1 if stops is None else integers(function, "global_block_end_indices", stops, 1)
    if len(begins) != len(ends):
        raise AttentionLayoutError(
            f"{function}: each range of global blocks has an end",
            where="global_block_end_indices",
            got=f"{len(ends)} ends of {len(begins)} ranges",
            want=f"{len(begins)} numbers",
        )
    for i, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        name = "global_block_indices" if stops is None else "global_block_end_indices"
        if begin >= end:
            raise AttentionLayoutError(
                f"{function}: a range of global blocks is empty",
                where=f"{name}[{i}]",
                got=f"{begin} to {end}",
                want="an end after its beginning",
            )
        if end > blocks:
            raise AttentionLayoutError(
                f"{function}: a global block lies beyond the last",
                where=f"{name}[{i}]",
                got=f"{begin if stops is None else end}\n{_ruler(blocks, end - 1)}",
                want=f"0 to {blocks - 1}" if stops is None else f"at most {blocks}",
                hint="a layout of more blocks, then .cropped(blocks)",
            )
    return begins, ends


def _ruler(blocks: int, at: int) -> str:
    """Draw a row of blocks, and where a block beyond it would be."""
    cells = "#" * blocks if blocks <= 40 else f"{'#' * 12}...{'#' * 12}"
    gap = at - blocks if at - blocks <= 20 else 20
    return f"{cells}{' ' * gap}^  block {at} of 0 to {blocks - 1}"
