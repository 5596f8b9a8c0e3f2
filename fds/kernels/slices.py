"""Flat slices, of which one launch updates many: their checks, their tables, and what kernels do with each.

An update writes 1-D tensors of one length in place. Values that change between updates are 0-d tensors on their
device, which the kernel reads: nothing waits for the device, and a CUDA graph of the launch remains valid.

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
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from operator import attrgetter
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import KernelError, is_number
from fds.kernels import arguments
from fds.kernels.choice import all_run_triton
from fds.kernels.language import cdiv, current_stream, is_capturing, jit, tl, to_device

Slices = Tensor | Sequence[Tensor]
MaybeSlices = Tensor | Sequence[Tensor | None] | None
Row = tuple[Any, ...]  # the tensors of one slice; None for an optional one that is absent
Column = list[Any]  # the same tensor of every slice

# Elements per program, elements per thread and access, and warps, by bytes per element of param. With eight elements
# per thread up to 128 bytes are in flight (param, gradient, two moments), so that two programs cover a multiprocessor's
# share of latency times bandwidth (some 25 KB), and registers allow seven or more. VECTOR bounds the vectors of
# narrower tensors to as many elements, so that all accesses have one layout. Without it, Adam with 16-bit gradients
# takes 92 registers on sm_90 instead of 64, and values are exchanged through shared memory. Derived from that, not
# measured.
LAUNCH = {4: {"BLOCK": 1024, "VECTOR": 4, "num_warps": 4}, 2: {"BLOCK": 2048, "VECTOR": 8, "num_warps": 8}}

_SCALARS = {
    "step": (torch.int64,), "lr": (torch.float64, torch.float32), "grad_scale": (torch.float32, torch.float64),
    "skip": (torch.bool,),
}

# From this average number of elements on, slices are launched one by one. Moving their bytes takes the device 12 us (12
# per element, SGD) to 27 us (28, Adam) at 4.3 TB/s, and a launch takes the host some 15 us: the device need not wait,
# and programs read no tables. Derived, not measured.
LARGE = 2**22
WIDEST = 16  # bytes of an access

_dtype_of, _FLOATING = attrgetter("dtype"), frozenset(arguments.FLOATING)


@attrs.frozen
class Columns:
    """All slices: lists of what each has.

    Attributes:
        columns: of every tensor: the parameters, the gradients, ...; None for an optional one that is absent.
        sizes: elements.
        addresses: as columns; 0 for None.
        dtypes: of the tensors of a slice; None for None.
    """

    columns: list[Column]
    sizes: list[int]
    addresses: list[list[int]]
    dtypes: list[tuple[torch.dtype | None, ...]]

    def rows(self) -> Iterator[Row]:
        """Yield the tensors of every slice, in one dimension."""
        for row in zip(*self.columns, strict=True):
            yield tuple([None if x is None else x.view(-1) for x in row])

    def row(self, i: int) -> Row:
        """Return the tensors of a slice as they are."""
        return tuple([column[i] for column in self.columns])

    def are_alike(self) -> bool:
        """Return whether all slices have the same dtypes; counting one tuple is 15 us faster than hashing 148."""
        return self.dtypes.count(self.dtypes[0]) == len(self.dtypes)

    def run_triton(self, kernel: str) -> bool:
        """Return whether the Triton kernel of this name runs on all of these slices."""
        return all_run_triton(kernel, self.columns[0][:1] if self.are_alike() else self.columns[0])


@attrs.frozen
class Group:
    """Slices of the same dtypes and alignment.

    Attributes:
        indices: of the slices.
        sizes: their elements.
        table: (S, 1 + K) int64 on the device: sizes and addresses; None where each slice is launched by itself.
        aligned: whether all addresses in the table are multiples of 16 bytes.
        meta: a row of the launch table.
    """

    indices: Sequence[int]
    sizes: tuple[int, ...]
    table: Tensor | None
    aligned: bool
    meta: dict[str, int]


@attrs.frozen
class KernelLaunch:
    """The arguments of one launch.

    Attributes:
        row: the tensors of the only slice, or of the first of many with the same dtypes.
        tiles: (T, 2) int32 on the device, or None for a single slice.
        table: that of the group.
        size: elements of the only slice.
        grid: number of programs.
        aligned: that of the group.
        meta: that of the group.
    """

    row: Row
    tiles: Tensor | None
    table: Tensor | None
    size: int
    grid: tuple[int]
    aligned: bool
    meta: dict[str, int]


def columns(optional: Mapping[str, MaybeSlices], **required: Slices) -> Columns:
    """Return `param`, `grad` and the state of all slices, then what is optional.

    A gradient that is not contiguous is copied. All but `param` may have any shape of as many elements.

    Raises `KernelError`, with name and index, unless there are as many of each as of `param`, all on one device and
    accepted by `_check_slice`.
    """
    param, names = required["param"], (*required, *optional)
    if param is None:
        _check_there("param", param)
    count = len(param) if isinstance(param, Sequence) else 1
    lists = [_column(name, x, count) for name, x in required.items()]
    lists += [[None] * count if x is None else _column(name, x, count) for name, x in optional.items()]
    if (plain := _plain(lists, len(required))) is not None:
        return plain
    for name, x in required.items():
        _check_there(name, x)
    rows = []
    for i, row in enumerate(zip(*lists, strict=True)):
        place = f"[{i}]" if isinstance(param, Sequence) else ""
        rows.append(_checked(dict(zip(names, row, strict=True)), lists[0][0], place))
    lists = [list(column) for column in zip(*rows, strict=True)]
    addresses = [[0 if x is None else x.data_ptr() for x in column] for column in lists]
    kinds = [[None if x is None else x.dtype for x in column] for column in lists]
    return Columns(lists, [row[0].numel() for row in rows], addresses, list(zip(*kinds, strict=True)))


def _check_there(name: str, x: MaybeSlices) -> None:
    missing = [i for i, tensor in enumerate(x) if tensor is None] if isinstance(x, Sequence) else [0] * (x is None)
    if missing:
        where = f"{name}[{missing[0]}]" if isinstance(x, Sequence) else name
        raise KernelError(f"{where} is missing", where=where, got="None", want="a tensor (N,)")


def _column(name: str, x: MaybeSlices, count: int) -> Column:
    column = list(x) if isinstance(x, Sequence) else [x]
    if len(column) != count:
        raise KernelError(f"{name} has another number of slices than param", where=name, got=str(len(column)),
                          want=str(count))
    return column


def _plain(lists: list[Column], required: int) -> Columns | None:
    """Return slices that all have the same dtypes, where none needs an error or a copy, else None.

    One property of all tensors at a time: 0.25 us a tensor on a slow host, where `_checked` takes 2.
    """
    addresses: list[list[int]] = []
    kinds: list[torch.dtype | None] = []
    try:
        sizes, device = list(map(Tensor.numel, lists[0])), set(map(Tensor.get_device, lists[0]))
        if len(device) != 1 or not {1}.issuperset(map(Tensor.dim, lists[0])):
            return None
        for k, column in enumerate(lists):
            if k >= required and column[0] is None and set(map(type, column)) == {type(None)}:
                addresses.append([0] * len(sizes))
                kinds.append(None)
                continue
            dtypes = set(map(_dtype_of, column))
            if not (
                len(dtypes) == 1 and dtypes <= _FLOATING and list(map(Tensor.numel, column)) == sizes
                and all(map(Tensor.is_contiguous, column)) and device.issuperset(map(Tensor.get_device, column))
            ):
                return None
            addresses.append(list(map(Tensor.data_ptr, column)))
            kinds += dtypes
            if 0 in addresses[-1]:  # empty, or on the meta device, whose index is that of the CPU
                return None
    except (TypeError, AttributeError):  # not a tensor
        return None
    return Columns(lists, sizes, addresses, [tuple(kinds)] * len(sizes))


def _checked(named: dict[str, Any], first: Any, place: str) -> Row:
    param, *others = named.values()
    if isinstance(param, Tensor):
        flatten = lambda x: isinstance(x, Tensor) and x.is_contiguous() and x.numel() == param.numel()
        others = [x.view(-1) if flatten(x) else x for x in others]
    grad, *written = others
    _check_slice(param, read={"grad": grad}, written=dict(zip(list(named)[2:], written, strict=True)), place=place)
    arguments.floating(**{"param[0]": first, f"param{place}": param})
    return (param, grad.contiguous(), *written)


def _check_slice(
    param: Tensor, *, read: dict[str, Tensor], written: dict[str, Tensor | None], place: str = ""
) -> None:
    """Raise `KernelError` unless all are floating-point (N,) on one device, and those that are written contiguous.

    `place` is appended to names in errors: the index of the slice among many, as "[3]".
    """
    named = {f"{name}{place}": x for name, x in {"param": param, **read, **written}.items()}
    arguments.floating(**named)
    if param.dim() != 1:
        raise KernelError(f"param{place} is not flat", where=f"param{place}", got=str(tuple(param.shape)), want="(N,)",
                          hint="param.view(-1)")
    arguments.shape((param.numel(),), **named)
    for name, x in named.items():
        if name.removesuffix(place) in read:
            continue
        if x is not None and not x.is_contiguous():
            raise KernelError(f"{name} is written in place, and not contiguous", where=name,
                              got=f"stride {x.stride()}", want="stride (1,)")


def groups(columns: Columns) -> Iterator[Group]:
    """Yield the groups of the slices on one device, without those that are empty.

    Large slices, and a single one, are launched by themselves. So is every slice where a CUDA graph is captured: its
    replays would copy tables from memory that was freed since, and their launches cost the host nothing.
    """
    device, captured = columns.columns[0][0].device, is_capturing(columns.columns[0][0].device)
    for (aligned, dtype, *_), indices in _together(columns).items():
        sizes = tuple([columns.sizes[i] for i in indices])
        table = None
        if not captured and len(sizes) > 1 and sum(sizes) < LARGE * len(sizes):
            whole = len(sizes) == len(columns.sizes)
            numbers = chain(sizes, *(x if whole else [x[i] for i in indices] for x in columns.addresses))
            table = _table(tuple(numbers), len(sizes), device, current_stream(device))
        yield Group(indices, sizes, table, aligned and table is not None, LAUNCH[dtype.itemsize])


def _together(columns: Columns) -> Mapping[tuple[Any, ...], Sequence[int]]:
    """Return the slices that are not empty by alignment and dtypes."""
    if columns.are_alike() and all(columns.sizes) and _is_aligned(chain(*columns.addresses)):
        return {(True, *columns.dtypes[0]): range(len(columns.sizes))}
    together: dict[tuple[Any, ...], list[int]] = {}
    for i, (size, *row) in enumerate(zip(columns.sizes, *columns.addresses, strict=True)):
        if size:
            together.setdefault((_is_aligned(row), *columns.dtypes[i]), []).append(i)
    return together


def _is_aligned(addresses: Iterable[int]) -> bool:
    return math.gcd(WIDEST, *addresses) == WIDEST


def launches(columns: Columns) -> Iterator[KernelLaunch]:
    """Yield the launches that update slices on one device: one for those of a group with a table."""
    for group in groups(columns):
        meta, indices = group.meta, group.indices
        if group.table is None:
            for i, size in zip(indices, group.sizes, strict=True):
                yield KernelLaunch(columns.row(i), None, None, size, (cdiv(size, meta["BLOCK"]),), False, meta)
        else:
            tiles = _tiles(group.sizes, meta["BLOCK"], group.table.device)
            yield KernelLaunch(columns.row(indices[0]), tiles, group.table, 0, (len(tiles),), group.aligned, meta)


@functools.cache
def _tiles(sizes: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """Return the table of tiles, made once for slices of these lengths.

    It is never freed, and complete on every stream before anything reads it.
    """
    counts = -(-torch.tensor(sizes, device="cpu") // block)
    slices = torch.repeat_interleave(counts)
    blocks = torch.arange(len(slices), device="cpu") - (counts.cumsum(0) - counts)[slices]
    return torch.stack([slices, blocks], dim=1).int().to(device)


# A table is a function of its key alone, so a cached one is always valid. Keys repeat: the caching allocator gives a
# step the memory that the step before freed, and the state stays in place. The stream is part of the key, because
# tables are copied, read and freed in its order.
@functools.lru_cache(maxsize=64)
def _table(numbers: tuple[int, ...], count: int, device: torch.device, stream: int) -> Tensor:
    """Return the table of these sizes and addresses, all of one tensor after all of another."""
    by_tensor = torch.frombuffer(array("q", numbers), dtype=torch.int64).view(-1, count)
    return to_device(by_tensor.t().contiguous(), device)


def scalars(param: Tensor, **named: Tensor | None) -> None:
    """Raise `KernelError` unless step, lr, grad_scale and skip are 0-d tensors of their dtypes, on `param`'s device."""
    for name, x in named.items():
        if x is None and name in ("grad_scale", "skip"):
            continue
        if not isinstance(x, Tensor) or x.dim() != 0 or x.dtype not in _SCALARS[name] or x.device != param.device:
            got = f"{tuple(x.shape)} {x.dtype} on {x.device}" if isinstance(x, Tensor) else repr(x)
            raise KernelError(
                f"{name} is not a 0-d tensor of its dtype on the device", where=name, got=got,
                want=f"a () {' or '.join(map(str, _SCALARS[name]))} tensor on {param.device}",
            )


def numbers(*, high: float = inf, **named: float) -> None:
    """Raise `KernelError` unless all are Python numbers in [0, high)."""
    for name, x in named.items():
        if not is_number(x) or not 0 <= x < high:
            raise KernelError(f"{name} is out of range", where=name, got=repr(x),
                              want=f"a Python number in [0, {high:g})")


def wide(*tensors: Tensor) -> list[Tensor]:
    """Return tensors in the dtype in which a reference computes: float64 if the first is, else float32."""
    return [x.to(arguments.width(tensors[0])) for x in tensors]


def write(old: Tensor, new: Tensor, skip: Tensor | None) -> None:
    """Write `new` over `old`, unless skipped."""
    old.copy_(new if skip is None else torch.where(skip, old, new.to(old.dtype)))


def log_of(beta: float, *, corrected: bool = True) -> float:
    """Return log(beta) for `correction`, or -inf, for which the correction is 1, unless `corrected`."""
    return math.log(beta) if corrected and beta > 0 else -inf


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


@jit
def correction(updates, log_beta):
    """Return 1 - beta^updates in float32, within some 2 units in the last place; `updates` is at least 1."""
    y = -updates.to(tl.float32) * log_beta
    near = tl.minimum(y, 1.0)  # below 1, 1 - exp(-y) would cancel: its series up to y^11
    series = near * 0 + 1
    for k in tl.static_range(11, 1, -1):  # pyright: ignore[reportGeneralTypeIssues]
        series = 1 - near * series * (1.0 / k)
    return tl.where(y < 1, near * series, 1 - tl.exp(-y))


@jit
def blend(old, new, fresh):
    """Return old + fresh * (new - old), accurately for `fresh` near 0 and near 1.

    `fresh` is 1 - beta, which float32 represents more accurately than a beta near 1.
    """
    return (old - fresh * old) + fresh * new


@jit
def load(pointer, at, inside):
    """Return elements in float32."""
    return tl.load(pointer + at, mask=inside).to(tl.float32)


@jit
def save(pointer, at, x, mask):
    """Store elements in the dtype of their tensor."""
    tl.store(pointer + at, x.to(pointer.dtype.element_ty), mask=mask)


@jit
def gradient(grad_ptr, at, inside, scale_ptr):
    """Return gradients in float32, divided by their scale."""
    g = tl.load(grad_ptr + at, mask=inside).to(tl.float32)
    if scale_ptr is not None:
        g = g / tl.load(scale_ptr).to(tl.float32)
    return g


@jit
def written(inside, skip_ptr):
    """Return the mask of a store: `inside`, or nothing if the update is skipped.

    The scalar condition goes through `tl.where`: the interpreter broadcasts it in the dtype that was compared, which
    Triton 3.9 does not accept as a mask.
    """
    if skip_ptr is None:
        mask = inside
    elif inside is None:
        mask = tl.where(tl.load(skip_ptr) == 0, True, False)
    else:
        mask = tl.where(tl.load(skip_ptr) == 0, inside, False)
    return mask


@jit
def store(param_ptr, out_ptr, at, p, mask):
    """Store new parameters, and their low-precision copy if there is one."""
    p = p.to(param_ptr.dtype.element_ty)
    tl.store(param_ptr + at, p, mask=mask)
    if out_ptr is not None:
        tl.store(out_ptr + at, p.to(out_ptr.dtype.element_ty), mask=mask)
