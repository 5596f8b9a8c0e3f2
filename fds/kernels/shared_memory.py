"""Rows of launch tables by the shared memory that a block may use on a GPU, of which few have as much as Hopper.

A row is chosen by the limit of the device, and nothing is tried out::

    SHORT = {227: {"STAGES": 3}, 99: {"STAGES": 2}}      # KiB that a row may take: the row
    row = fitting(SHORT, x.device)

Source: CUDA C++ Programming Guide, table "Technical specifications per compute capability": the most shared memory per
thread block, in KiB: 163 of 8.0 and 8.7, 99 of 8.6, 8.9 and 12.0, 227 of 9.0 and 10.0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TypeVar

import torch

LEAST = 99  # of the GPUs that can run bfloat16, from compute capability 8.0 on; every table has a row for it
MOST = 227

Row = TypeVar("Row")


@functools.cache
def limit(device: torch.device) -> int:
    """Return how many KiB of shared memory a block may use on a device; on the CPU, to be interpreted, as on Hopper."""
    if device.type != "cuda":
        return MOST
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin // 1024


def fitting(rows: Mapping[int, Row], device: torch.device) -> Row:
    """Return the row for the most KiB that the device has; on a device with less than all ask for, that for the least.

    There is no smaller row to fall back to, so Triton refuses such a launch there by the bytes that it needs.
    """
    if len(rows) == 1:
        return next(iter(rows.values()))
    most = limit(device)
    return rows[max((kib for kib in rows if kib <= most), default=min(rows))]
