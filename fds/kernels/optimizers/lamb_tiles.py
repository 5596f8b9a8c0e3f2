"""Where LAMB's parameters lie in its slices, and the tiles into which they are cut."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import KernelError
from fds.kernels.language import is_capturing

Spans = Sequence[tuple[int, int]]  # (offset, length) of every parameter in a slice
SliceSpans = tuple[tuple[tuple[int, int], ...], ...]  # of all slices


@attrs.frozen(eq=False)
class Tiles:
    """The tables of tiles, on the device, and where those of each slice begin and end.

    Attributes:
        table: (T, 5) int32 lines (slice in its group, block, low, high, segment): the elements [low, high) of a block,
            whose start is a multiple of its size, so that the compiler knows the alignment.
        bounds: (S, 2) int32, the first tile of every segment of all slices, and the one after its last.
        starts: first tile of each slice.
        ends: the one after its last.
        count: T.
    """

    table: Tensor
    bounds: Tensor
    starts: dict[int, int]
    ends: dict[int, int]
    count: int


@functools.cache
def tiles_of(spans: SliceSpans, groups: tuple[tuple[tuple[int, ...], int], ...], device: torch.device) -> Tiles:
    """Return the tiles of slices in groups, which are given as (indices, elements of a block).

    Made once for a layout, never freed, and complete on every stream before anything reads it: a CUDA graph may hold
    it. Raises `KernelError` where one is captured, which cannot wait for the copy.
    """
    if is_capturing(device):
        raise KernelError("a CUDA graph cannot capture the first update of a layout", where="segments",
                          got=f"{sum(map(len, spans))} of them, now first seen", want="a step before the capture")
    numbers, firsts = [], [0]
    for inside in spans:
        firsts.append(firsts[-1] + len(inside))
    lines = [(place, i, block) for indices, block in groups for place, i in enumerate(indices)]
    for place, i, block in lines:
        numbers += [(place, firsts[i] + k, offset, length, block) for k, (offset, length) in enumerate(spans[i])]
    place, segment, offset, length, block = torch.tensor(numbers, dtype=torch.int64, device="cpu").view(-1, 5).T
    begin, end = offset // block, -(-(offset + length) // block)
    counts = torch.where(length > 0, end - begin, 0)
    ends = counts.cumsum(0)
    of = torch.repeat_interleave(counts)  # counts[0] times 0, then counts[1] times 1, ...
    blocks = begin[of] + torch.arange(len(of), device="cpu") - (ends - counts)[of]
    low = (offset[of] - blocks * block[of]).clamp(min=0)
    high = torch.minimum(offset[of] + length[of] - blocks * block[of], block[of])
    bounds = torch.zeros(firsts[-1], 2, dtype=torch.int64, device="cpu")
    bounds[segment] = torch.stack([ends - counts, ends], dim=1)
    table = torch.stack([place[of], blocks, low, high, segment[of]], dim=1)
    starts, stops, done = {}, {}, 0
    for _, i, _ in lines:
        starts[i] = done
        done += int((bounds[firsts[i] : firsts[i + 1], 1] - bounds[firsts[i] : firsts[i + 1], 0]).sum())
        stops[i] = done
    return Tiles(table.int().to(device), bounds.int().to(device), starts, stops, done)


def checked(segments: Spans | Sequence[Spans], sizes: Sequence[int], *, many: bool) -> SliceSpans:
    """Return the segments of all slices. Raises `KernelError` where they do not lie in a slice, or overlap."""
    lists: Any = segments if many else [segments]
    spans: SliceSpans = tuple(map(tuple, lists))
    if len(spans) != len(sizes):
        raise KernelError("segments has another number of slices than param", where="segments", got=str(len(spans)),
                          want=str(len(sizes)))
    _check(spans, tuple(sizes), many)
    return spans


@functools.lru_cache(maxsize=256)
def _check(spans: SliceSpans, sizes: tuple[int, ...], many: bool) -> None:
    for k, (inside, size) in enumerate(zip(spans, sizes, strict=True)):
        last, of = 0, f"segments[{k}]" if many else "segments"
        for (offset, length), i in sorted(zip(inside, range(len(inside)), strict=True)):
            if offset < 0 or length < 0 or offset + length > size:
                raise KernelError("a segment does not lie in the slice", where=f"{of}[{i}]",
                                  got=f"(offset {offset}, length {length})", want=f"inside {size} elements")
            if length and offset < last:
                raise KernelError("a segment overlaps another", where=f"{of}[{i}]",
                                  got=f"offset {offset}", want=f"{last} or more")
            last = max(last, offset + length)
