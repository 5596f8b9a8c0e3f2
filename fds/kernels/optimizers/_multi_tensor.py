"""Updates of many flat slices in one launch.

Without sharding there is one slice per parameter: hundreds, most of which the device updates faster than the host
launches a kernel. In one launch for all of them a program finds its slice and block in a table of tiles (T, 2) int32,
and the slice's length and the addresses of its K tensors in a table (S, 1 + K) int64.

Moves, beside the update, 8 bytes per tile of 1024 elements or more, and 8 (1 + K) per slice; neighbours find both in
the L2 cache. A program waits twice for that cache before it loads its elements, while six or more others on its
multiprocessor load theirs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import KernelError
from fds.kernels import arguments
from fds.kernels.choice import all_run_triton
from fds.kernels.language import cdiv, current_stream, is_capturing, jit, tl, to_device
from fds.kernels.optimizers import flat

Slices = Tensor | Sequence[Tensor]
MaybeSlices = Tensor | Sequence[Tensor | None] | None
Row = tuple[Any, ...]  # the tensors of one slice; None for an optional one that is absent

# From this average number of elements on, slices are launched one by one. Moving their bytes takes the device 12 us (12
# per element, SGD) to 27 us (28, Adam) at 4.3 TB/s, and a launch takes the host some 15 us: the device need not wait,
# and programs read no tables. Derived, not measured.
LARGE = 2**22
WIDEST = 16  # bytes of an access


@attrs.frozen
class KernelLaunch:
    """The arguments of one launch.

    Attributes:
        row: the tensors of the only slice, or of the first of many with the same dtypes.
        tiles: (T, 2) int32 on the device, or None for a single slice.
        table: (S, 1 + K) int64 on the device, or None.
        size: elements of the only slice.
        grid: number of programs.
        aligned: whether all addresses in the table are multiples of 16 bytes.
        meta: a row of the launch table.
    """

    row: Row
    tiles: Tensor | None
    table: Tensor | None
    size: int
    grid: tuple[int]
    aligned: bool
    meta: dict[str, int]


def rows(optional: Mapping[str, MaybeSlices], **required: Slices) -> list[Row]:
    """Return the tensors of every slice: `param`, `grad` and the state, then the optional ones.

    A gradient that is not contiguous is copied; None stands for an optional tensor that is absent.

    Raises `KernelError`, with name and index, unless there are as many of each as of `param`, all on one device and
    accepted by `flat.slices`.
    """
    param, names = required["param"], (*required, *optional)
    count = len(param) if isinstance(param, Sequence) else 1
    columns = [_column(name, x, count, needed=True) for name, x in required.items()]
    columns += [_column(name, x, count, needed=False) for name, x in optional.items()]
    result = list(zip(*columns, strict=True))
    for i, row in enumerate(result):
        if not _is_plain(row, result[0][0]):
            place = f"[{i}]" if isinstance(param, Sequence) else ""
            result[i] = _checked(dict(zip(names, row, strict=True)), result[0][0], place)
    return result


def _column(name: str, x: MaybeSlices, count: int, *, needed: bool) -> list[Any]:
    column = list(x) if isinstance(x, Sequence) else [x] * (1 if needed or x is not None else count)
    if len(column) != count:
        raise KernelError(f"{name} has another number of slices than param", where=name, got=str(len(column)),
                          want=str(count))
    if needed and (missing := [i for i, x in enumerate(column) if x is None]):
        where = f"{name}[{missing[0]}]" if isinstance(x, Sequence) else name
        raise KernelError(f"{where} is missing", where=where, got="None", want="a tensor (N,)")
    return column


def _is_plain(row: Row, first: Any) -> bool:
    """Return whether a slice needs neither an error nor a copy: 1.7 us on a slow host, where `_checked` takes 7."""
    param = row[0]
    if not isinstance(param, Tensor) or param.dim() != 1:
        return False
    shape, device = param.shape, first.device
    for x in row:
        if x is not None and not (
            isinstance(x, Tensor) and x.dtype in arguments.FLOATING and x.shape == shape and x.device == device
            and x.is_contiguous()
        ):
            return False
    return True


def _checked(named: dict[str, Any], first: Any, place: str) -> Row:
    param, grad, *others = named.values()
    flat.slices(param, read={"grad": grad}, written=dict(zip(list(named)[2:], others, strict=True)), place=place)
    arguments.floating(**{"param[0]": first, f"param{place}": param})
    return (param, grad.contiguous(), *others)


def run_triton(kernel: str, slices: list[Row]) -> bool:
    """Return whether the Triton kernel of this name runs on all of these slices."""
    return all_run_triton(kernel, [row[0] for row in slices])


def launches(slices: list[Row]) -> Iterator[KernelLaunch]:
    """Yield the launches that update slices on one device: one for all with the same dtypes and alignment.

    Large slices, and a single one, have a launch each. So has every slice where a CUDA graph is captured: its replays
    would copy tables from memory that was freed since, and their launches cost the host nothing.
    """
    groups: dict[tuple, list[tuple[Row, tuple[int, ...]]]] = {}
    captured = is_capturing(slices[0][0].device)
    for row in slices:
        if size := row[0].numel():
            addresses = [0 if x is None else x.data_ptr() for x in row]
            aligned = math.gcd(WIDEST, *addresses) == WIDEST
            key = (aligned, *[None if x is None else x.dtype for x in row])
            groups.setdefault(key, []).append((row, (size, *addresses)))
    for (aligned, *_), group in groups.items():
        if captured or len(group) == 1 or sum(line[0] for _, line in group) >= LARGE * len(group):
            yield from (_alone(row) for row, _ in group)
        else:
            yield _together(group[0][0], tuple(line for _, line in group), aligned)


def _alone(row: Row) -> KernelLaunch:
    meta, size = flat.LAUNCH[row[0].element_size()], row[0].numel()
    return KernelLaunch(row, None, None, size, (cdiv(size, meta["BLOCK"]),), False, meta)


def _together(row: Row, lines: tuple[tuple[int, ...], ...], aligned: bool) -> KernelLaunch:
    meta, device = flat.LAUNCH[row[0].element_size()], row[0].device
    stream = current_stream(device)
    tiles = _tiles(tuple(line[0] for line in lines), meta["BLOCK"], device, stream)
    return KernelLaunch(row, tiles, _table(lines, device, stream), 0, (len(tiles),), aligned, meta)


# A table is a function of its key alone, so a cached one is always valid. Keys repeat: the caching allocator gives a
# step the memory that the step before freed, and the state stays in place. The stream is part of the key, because
# tables are copied, read and freed in its order.
@functools.lru_cache(maxsize=64)
def _tiles(sizes: tuple[int, ...], block: int, device: torch.device, stream: int) -> Tensor:
    counts = -(-torch.tensor(sizes, device="cpu") // block)
    slices = torch.repeat_interleave(counts)
    blocks = torch.arange(len(slices), device="cpu") - (counts.cumsum(0) - counts)[slices]
    return to_device(torch.stack([slices, blocks], dim=1).int(), device)


@functools.lru_cache(maxsize=64)
def _table(lines: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> Tensor:
    numbers = [number for line in lines for number in line]  # twice as fast as from tuples of tuples
    return to_device(torch.tensor(numbers, device="cpu").view(len(lines), -1), device)


@jit
def own_line(tiles_ptr, table_ptr, NUM_KINDS: tl.constexpr):
    """Return the row of this program's slice in the table of addresses; None without a table."""
    line = table_ptr
    if tiles_ptr is not None:
        tile = tiles_ptr + tl.program_id(0).to(tl.int64) * 2
        line = table_ptr + tl.load(tile).to(tl.int64) * (1 + NUM_KINDS)
    return line


@jit
def own_block(line, tiles_ptr, size, BLOCK: tl.constexpr):
    """Return the length of this program's slice and the first element of its block; a single slice has `size`."""
    block = tl.program_id(0)
    if line is not None:
        size = tl.load(line)
        block = tl.load(tiles_ptr + tl.program_id(0).to(tl.int64) * 2 + 1)
    return size, block.to(tl.int64) * BLOCK


@jit
def tensor(line, kind: tl.constexpr, like, ALIGNED: tl.constexpr):
    """Return the pointer to tensor number `kind` of the slice, with the dtype of `like`.

    It is `like` itself without a table, and where that is None.
    """
    pointer = like
    if line is not None and like is not None:
        pointer = tl.load(line + 1 + kind).to(like.dtype)
        if ALIGNED:
            pointer = tl.multiple_of(pointer, 16)  # WIDEST
    return pointer
