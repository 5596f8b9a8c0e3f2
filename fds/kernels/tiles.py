"""Tiles of rows by columns, of which elementwise kernels take one per program, and sums over rows in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fds.kernels.language import cdiv, next_power_of_2, num_processors

LEAST_COLUMNS = 16  # of a tile: one vector of 16 bytes, and a multiple of the four columns that a word of a mask covers


def extent(x: Tensor) -> tuple[int, int]:
    """Return (rows, columns): the product of all leading dimensions, and the last."""
    return math.prod(x.shape[:-1]), x.shape[-1]


def like(x: Tensor) -> Tensor:
    """Return uninitialised contiguous memory of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def empty_sums(x: Tensor, has_bias: bool) -> Tensor:
    """Return memory for the sums over rows, (N,) float32, or of no element without a bias."""
    return x.new_empty(x.shape[-1] if has_bias else 0, dtype=torch.float32)


def tile(row: Mapping[str, int], columns: int) -> dict[str, int]:
    """Return ROWS, COLUMNS and num_warps for tensors of this many columns, given a row of a launch table.

    ELEMENTS in it is the size of a tile, COLUMNS its greatest width; all are powers of two.
    """
    wide = min(row["COLUMNS"], max(next_power_of_2(columns), LEAST_COLUMNS))
    return {"ROWS": row["ELEMENTS"] // wide, "COLUMNS": wide, "num_warps": row["num_warps"]}


def grid(meta: Mapping[str, int], rows: int, columns: int) -> tuple[int]:
    """Return the grid that covers a tensor with one tile per program; neighbours share their rows."""
    return (cdiv(rows, meta["ROWS"]) * cdiv(columns, meta["COLUMNS"]),)


def rows_each(meta: Mapping[str, int], x: Tensor, rows: int, columns: int) -> int:
    """Return how many rows a program sums over, tile after tile; a multiple of ROWS.

    Each program writes one line of partial sums (float32). At least 4 tiles, or 16 rows, so that the sums are small
    beside what is read and stay in the L2 cache; about 8 programs per processor, which keep enough loads in
    flight (derived, not measured).
    """
    least = max(4 * meta["ROWS"], 16)
    groups = max(1, min(cdiv(rows, least), cdiv(8 * num_processors(x.device), max(cdiv(columns, meta["COLUMNS"]), 1))))
    return cdiv(cdiv(max(rows, 1), groups), meta["ROWS"]) * meta["ROWS"]
