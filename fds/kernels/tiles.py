"""Rows by columns, cut into tiles: how elementwise kernels see a tensor, and sum over its rows in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fds.kernels.language import cdiv, next_power_of_2, num_processors

LEAST_COLUMNS = 16  # of a tile: one vector of 16 bytes, and a whole number of a mask's groups of four


def extent(x: Tensor) -> tuple[int, int]:
    """Return (rows, columns): the product of all leading dimensions, and the last."""
    return math.prod(x.shape[:-1]), x.shape[-1]


def like(x: Tensor) -> Tensor:
    """Return memory for a result of x's shape and dtype, in one piece."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def tile(row: Mapping[str, int], columns: int) -> dict[str, int]:
    """Return ROWS, COLUMNS and num_warps of a launch table's row, for tensors of so many columns.

    The row says ELEMENTS of a tile, at most COLUMNS of them in one line; all are powers of two.
    """
    wide = min(row["COLUMNS"], max(next_power_of_2(columns), LEAST_COLUMNS))
    return {"ROWS": row["ELEMENTS"] // wide, "COLUMNS": wide, "num_warps": row["num_warps"]}


def grid(meta: Mapping[str, int], rows: int, columns: int) -> tuple[int]:
    """Return how many programs cover all with one tile each; neighbours lie side by side."""
    return (cdiv(rows, meta["ROWS"]) * cdiv(columns, meta["COLUMNS"]),)


def rows_each(meta: Mapping[str, int], x: Tensor, rows: int, columns: int) -> int:
    """Return how many rows a program takes, tile after tile, that sums over them; a multiple of ROWS.

    Each program writes one line of partial sums (float32). At least 4 tiles, or 16 rows, so that these are few beside
    what is read, and they stay in the second-level cache; about 8 programs per processor, which keep enough loads in
    flight (derived, not measured).
    """
    least = max(4 * meta["ROWS"], 16)
    groups = max(1, min(cdiv(rows, least), cdiv(8 * num_processors(x.device), max(cdiv(columns, meta["COLUMNS"]), 1))))
    return cdiv(cdiv(max(rows, 1), groups), meta["ROWS"]) * meta["ROWS"]
