"""LAMB over a flat slice of many parameters, in place, in two passes; norms may be summed over ranks in between.

    g = grad / grad_scale
    m = m + (1 - beta1) * (g - m)                v = v + (1 - beta2) * (g^2 - v)
    u = m / (sqrt(v) + eps) + weight_decay * p                eps_inside_sqrt: m / sqrt(v + eps)
    c = clamp(|p| / |u|, min_coeff, max_coeff)                1 where either norm is 0; per parameter
    p = p - rate * c * u                         rate = lr * sqrt(1 - beta2^n) / (1 - beta1^n), n = step + 1

All (N,), cut into tiles that lie in one parameter each. The first pass updates m and v and sums |p|^2 and |u|^2 within
each tile, a launch in between adds the tiles of each parameter, and the second pass computes u again and updates p.
Three launches do so for all slices of the same dtypes. Squares are summed in float64, within a tile and then over tiles
in order: deterministic, and equal to some 1e-16 for any slicing of a parameter. Padding is neither read nor written.

Moves: 40 bytes per element in float32 with 16-bit gradient and copy: reads p, g, m, v, writes m, v; then reads p, m, v,
writes p, out. (Storing u between the passes would move as many, and take memory.)
Source: You et al. 2020, arXiv:1904.00962, algorithm 2; clamping and the correction of the rate rather than of the
moments are DeepSpeed's FusedLamb.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import KernelError
from fds.kernels import slices
from fds.kernels.language import is_capturing, jit, on, tl
from fds.kernels.slices import Columns, Group, MaybeSlices, Slices

Spans = Sequence[tuple[int, int]]  # (offset, length) of every parameter in a slice
SliceSpans = tuple[tuple[tuple[int, int], ...], ...]  # of all slices


def reference(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, segments: Spans,
    step: Tensor, lr: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float,
    min_coeff: float, max_coeff: float, bias_correction: bool = True, eps_inside_sqrt: bool = False,
    grad_scale: Tensor | None = None, skip: Tensor | None = None, out: Tensor | None = None,
    reduce: Callable[[Tensor], Tensor] = lambda squares: squares,
) -> None:
    """Do the same in plain torch."""
    direction = {"segments": segments, "eps": eps, "weight_decay": weight_decay, "eps_inside_sqrt": eps_inside_sqrt}
    squares = reduce(_reference_moments(param, grad, exp_avg, exp_avg_sq, beta1=beta1, beta2=beta2,
                                        grad_scale=grad_scale, skip=skip, **direction))
    _reference_params(param, exp_avg, exp_avg_sq, squares, step=step, lr=lr, beta1=beta1, beta2=beta2,
                      min_coeff=min_coeff, max_coeff=max_coeff, bias_correction=bias_correction, skip=skip, out=out,
                      **direction)


def _direction(p: Tensor, m: Tensor, v: Tensor, eps: float, weight_decay: float, eps_inside_sqrt: bool) -> Tensor:
    return m / ((v + eps).sqrt() if eps_inside_sqrt else v.sqrt() + eps) + weight_decay * p


def _reference_moments(
    param, grad, exp_avg, exp_avg_sq, *, segments, beta1, beta2, eps, weight_decay, eps_inside_sqrt, grad_scale, skip
) -> Tensor:
    both = param.new_zeros(2, len(segments), dtype=torch.float64)
    for i, span in enumerate(segments):
        p, g, m, v = slices.wide(*(_cut(x, span) for x in (param, grad, exp_avg, exp_avg_sq)))
        if grad_scale is not None:
            g = g / grad_scale
        m = (m + (1 - beta1) * (g - m)).to(exp_avg.dtype)
        v = (v + (1 - beta2) * (g * g - v)).to(exp_avg_sq.dtype)
        u = _direction(p, m.to(p.dtype), v.to(p.dtype), eps, weight_decay, eps_inside_sqrt)
        both[0, i], both[1, i] = p.double().square().sum(), u.double().square().sum()
        slices.write(_cut(exp_avg, span), m, skip)
        slices.write(_cut(exp_avg_sq, span), v, skip)
    return both


def _reference_params(
    param, exp_avg, exp_avg_sq, squares, *, segments, step, lr, beta1, beta2, eps, weight_decay, min_coeff, max_coeff,
    bias_correction, eps_inside_sqrt, skip, out,
) -> None:
    n = (step + 1).double()
    rate = lr * (1 - beta2**n).sqrt() / (1 - beta1**n) if bias_correction else lr
    p_norms, u_norms = squares.sqrt()
    trust = torch.where((p_norms > 0) & (u_norms > 0), (p_norms / u_norms).clamp(min_coeff, max_coeff), 1.0)
    for i, span in enumerate(segments):
        p, m, v = slices.wide(*(_cut(x, span) for x in (param, exp_avg, exp_avg_sq)))
        u = _direction(p, m, v, eps, weight_decay, eps_inside_sqrt)
        slices.write(_cut(param, span), p - rate * trust[i] * u, skip)
        if out is not None:
            slices.write(_cut(out, span), _cut(param, span), skip)


def _cut(x: Tensor, span: tuple[int, int]) -> Tensor:
    return x[span[0] : span[0] + span[1]]


@jit
def _toward(p, m, v, eps, weight_decay, EPS_INSIDE: tl.constexpr):
    if EPS_INSIDE:
        root = tl.sqrt(v + eps)
    else:
        root = tl.sqrt(v) + eps
    return m / root + weight_decay * p


@jit
def _moments(
    param_ptr, grad_ptr, m_ptr, v_ptr, sum_ptr, num_tiles, scale_ptr, skip_ptr, at, inside,
    fresh1, fresh2, eps, weight_decay, EPS_INSIDE: tl.constexpr,
):
    p = tl.load(param_ptr + at, mask=inside).to(tl.float32)
    m = tl.load(m_ptr + at, mask=inside).to(tl.float32)
    v = tl.load(v_ptr + at, mask=inside).to(tl.float32)
    g = slices.gradient(grad_ptr, at, inside, scale_ptr)
    m = slices.blend(m, g, fresh1).to(m_ptr.dtype.element_ty)
    v = slices.blend(v, g * g, fresh2).to(v_ptr.dtype.element_ty)
    mask = slices.written(inside, skip_ptr)
    tl.store(m_ptr + at, m, mask=mask)
    tl.store(v_ptr + at, v, mask=mask)
    u = _toward(p, m.to(tl.float32), v.to(tl.float32), eps, weight_decay, EPS_INSIDE).to(tl.float64)
    p = p.to(tl.float64)
    p2, u2 = p * p, u * u
    if inside is not None:
        p2, u2 = tl.where(inside, p2, 0.0), tl.where(inside, u2, 0.0)
    tl.store(sum_ptr, tl.sum(p2))
    tl.store(sum_ptr + num_tiles, tl.sum(u2))


@jit
def _line(tile, table_ptr):
    """Return the line of a tile's slice in the table of addresses; None without a table."""
    line = table_ptr
    if table_ptr is not None:
        line = table_ptr + tl.load(tile).to(tl.int64) * 6
    return line


@jit(do_not_specialize=["first", "num_tiles"])
def _moments_kernel(
    param_ptr, grad_ptr, m_ptr, v_ptr, sums_ptr, tiles_ptr, table_ptr, scale_ptr, skip_ptr, first, num_tiles,
    fresh1, fresh2, eps, weight_decay,
    EPS_INSIDE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):
    number = first + tl.program_id(0)
    tile = tiles_ptr + number.to(tl.int64) * 5
    block, low, high = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    line = _line(tile, table_ptr)
    param_ptr = slices.tensor(line, 0, param_ptr, ALIGNED)
    grad_ptr = slices.tensor(line, 1, grad_ptr, ALIGNED)
    m_ptr = slices.tensor(line, 2, m_ptr, ALIGNED)
    v_ptr = slices.tensor(line, 3, v_ptr, ALIGNED)
    sum_ptr = sums_ptr + number
    lane = tl.arange(0, BLOCK)
    at = tl.max_contiguous(block.to(tl.int64) * BLOCK + lane, VECTOR)
    if high - low == BLOCK:
        _moments(param_ptr, grad_ptr, m_ptr, v_ptr, sum_ptr, num_tiles, scale_ptr, skip_ptr, at, None,
                 fresh1, fresh2, eps, weight_decay, EPS_INSIDE)
    else:
        _moments(param_ptr, grad_ptr, m_ptr, v_ptr, sum_ptr, num_tiles, scale_ptr, skip_ptr, at,
                 (lane >= low) & (lane < high), fresh1, fresh2, eps, weight_decay, EPS_INSIDE)


@jit(do_not_specialize=["num_tiles"])
def _sum_kernel(sums_ptr, bounds_ptr, squares_ptr, num_tiles, CHUNK: tl.constexpr):
    segment, which = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(bounds_ptr + 2 * segment), tl.load(bounds_ptr + 2 * segment + 1)
    total = tl.zeros((CHUNK,), tl.float64)
    for start in range(first, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        total += tl.load(sums_ptr + which * num_tiles + at, mask=at < end, other=0.0)
    tl.store(squares_ptr + which * tl.num_programs(0) + segment, tl.sum(total))


@jit
def _params(
    param_ptr, m_ptr, v_ptr, out_ptr, skip_ptr, at, inside, rate, eps, weight_decay, EPS_INSIDE: tl.constexpr
):
    p = tl.load(param_ptr + at, mask=inside).to(tl.float32)
    m = tl.load(m_ptr + at, mask=inside).to(tl.float32)
    v = tl.load(v_ptr + at, mask=inside).to(tl.float32)
    u = _toward(p, m, v, eps, weight_decay, EPS_INSIDE)
    slices.store(param_ptr, out_ptr, at, p - rate * u, slices.written(inside, skip_ptr))


@jit(do_not_specialize=["first", "row"])
def _params_kernel(
    param_ptr, m_ptr, v_ptr, out_ptr, tiles_ptr, table_ptr, squares_ptr, step_ptr, lr_ptr, skip_ptr, first, row,
    log_beta1, log_beta2, eps, weight_decay, min_coeff, max_coeff,
    EPS_INSIDE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):
    # begin with the last tile, whose moments the first pass wrote last: they may still be in cache
    tile = tiles_ptr + (first + tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * 5
    block, low, high, segment = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    line = _line(tile, table_ptr)
    param_ptr = slices.tensor(line, 0, param_ptr, ALIGNED)
    m_ptr = slices.tensor(line, 2, m_ptr, ALIGNED)
    v_ptr = slices.tensor(line, 3, v_ptr, ALIGNED)
    out_ptr = slices.tensor(line, 4, out_ptr, ALIGNED)
    p_norm = tl.sqrt(tl.load(squares_ptr + segment))
    u_norm = tl.sqrt(tl.load(squares_ptr + row + segment))
    there = (p_norm > 0) & (u_norm > 0)
    trust = tl.minimum(tl.maximum((p_norm / tl.where(there, u_norm, 1.0)).to(tl.float32), min_coeff), max_coeff)
    n = tl.load(step_ptr) + 1
    rate = tl.load(lr_ptr).to(tl.float32) * tl.sqrt(slices.correction(n, log_beta2)) / slices.correction(n, log_beta1)
    rate *= tl.where(there, trust, 1.0)
    lane = tl.arange(0, BLOCK)
    at = tl.max_contiguous(block.to(tl.int64) * BLOCK + lane, VECTOR)
    if high - low == BLOCK:
        _params(param_ptr, m_ptr, v_ptr, out_ptr, skip_ptr, at, None, rate, eps, weight_decay, EPS_INSIDE)
    else:
        inside = (lane >= low) & (lane < high)
        _params(param_ptr, m_ptr, v_ptr, out_ptr, skip_ptr, at, inside, rate, eps, weight_decay, EPS_INSIDE)


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


def _checked(segments: Spans | Sequence[Spans], sizes: Sequence[int], *, many: bool) -> SliceSpans:
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


@attrs.frozen
class _Launch:
    """The arguments that a launch has beside those of all: of tiles `first` to `first + count`."""

    row: tuple[Any, ...]
    table: Tensor | None
    first: int
    count: int
    options: dict[str, Any]


def _launches(columns: Columns, groups: list[Group], tiles: Tiles) -> Iterator[_Launch]:
    """Yield the launches of a pass: one for a group with a table, else one for each slice."""
    for group in groups:
        options = {"ALIGNED": group.aligned, **group.meta}
        indices = list(group.indices)
        for i in indices[:1] if group.table is not None else indices:
            first, end = tiles.starts[i], tiles.ends[i if group.table is None else indices[-1]]
            if first < end:
                yield _Launch(columns.row(i), group.table, first, end - first, options)


@torch.no_grad()
def lamb(
    param: Slices, grad: Slices, exp_avg: Slices, exp_avg_sq: Slices, *, segments: Spans | Sequence[Spans],
    step: Tensor, lr: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float,
    min_coeff: float, max_coeff: float, bias_correction: bool = True, eps_inside_sqrt: bool = False,
    grad_scale: Tensor | None = None, skip: Tensor | None = None, out: MaybeSlices = None,
    reduce: Callable[[Tensor], Tensor] = lambda squares: squares,
) -> None:
    """Update the parameters of flat slices and their moments in place, in three launches for all of the same dtypes.

    Args:
        param: (N,) contiguous, float32 or 16 bit; arithmetic is in float32, norms in float64. Or a list of such slices,
            of any lengths; then grad, exp_avg, exp_avg_sq, segments and out, if not None, are lists of as many.
        grad: (N,), or any shape of N elements, of any floating dtype, multiplied by `grad_scale`.
        exp_avg: (N,) contiguous, the first moment.
        exp_avg_sq: (N,) contiguous, the second moment.
        segments: (offset, length) of every parameter in the slice, without overlap; a length may be 0.
        step: () int64, updates applied before this one.
        lr: () float64 or float32.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the square root, or under it.
        weight_decay: factor of the parameter in its update.
        min_coeff: least trust ratio c.
        max_coeff: greatest trust ratio c.
        bias_correction: False takes rate = lr.
        eps_inside_sqrt: whether eps is added under the root.
        grad_scale: () float32 divisor of the gradients, or None.
        skip: () bool, or None; if true, nothing is written, whatever the gradients are.
        out: (N,) contiguous, to which the new parameters are written in its dtype, or None.
        reduce: squared norms (2, S) float64 of the S segments of all slices -> those of whole parameters; not called
            where there are none.

    Raises `KernelError`, naming the argument, for any other shape, dtype, device or range.
    """
    slices.numbers(eps=eps, weight_decay=weight_decay, min_coeff=min_coeff, max_coeff=max_coeff)
    slices.numbers(beta1=beta1, beta2=beta2, high=1.0)
    columns = slices.columns({"out": out}, param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    if not columns.sizes:
        return
    slices.scalars(columns.columns[0][0], step=step, lr=lr, grad_scale=grad_scale, skip=skip)
    spans = _checked(segments, columns.sizes, many=isinstance(param, Sequence))
    if not any(spans):
        return
    options = {"step": step, "lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay,
               "min_coeff": min_coeff, "max_coeff": max_coeff, "bias_correction": bias_correction,
               "eps_inside_sqrt": eps_inside_sqrt, "grad_scale": grad_scale, "skip": skip}
    run = _by_kernels if columns.run_triton("lamb") else _by_reference
    run(columns, spans, reduce, **options)


def _by_kernels(
    columns: Columns, spans: SliceSpans, reduce: Callable[[Tensor], Tensor], *, step, lr, beta1, beta2, eps,
    weight_decay, min_coeff, max_coeff, bias_correction, eps_inside_sqrt, grad_scale, skip,
) -> None:
    like = columns.columns[0][0]
    groups = list(slices.groups(columns))
    tiles = tiles_of(spans, tuple((tuple(group.indices), group.meta["BLOCK"]) for group in groups), like.device)
    sums = like.new_empty(2, tiles.count, dtype=torch.float64)
    squares = like.new_empty(2, len(tiles.bounds), dtype=torch.float64)
    launches = list(_launches(columns, groups, tiles))
    with on(like):
        for at in launches:
            _moments_kernel[(at.count,)](
                *at.row[:4], sums, tiles.table, at.table, grad_scale, skip, at.first, tiles.count,
                1 - beta1, 1 - beta2, eps, weight_decay, EPS_INSIDE=eps_inside_sqrt, **at.options,
            )
        _sum_kernel[(len(tiles.bounds), 2)](sums, tiles.bounds, squares, tiles.count, CHUNK=1024)
        squares = reduce(squares)
        squares = squares if squares.stride(1) == 1 else squares.contiguous()
        for at in reversed(launches):
            param, _, m, v, low = at.row
            _params_kernel[(at.count,)](
                param, m, v, low, tiles.table, at.table, squares, step, lr, skip, at.first, squares.stride(0),
                slices.log_of(beta1, corrected=bias_correction), slices.log_of(beta2, corrected=bias_correction),
                eps, weight_decay, min_coeff, max_coeff, EPS_INSIDE=eps_inside_sqrt, **at.options,
            )


def _by_reference(columns: Columns, spans: SliceSpans, reduce: Callable[[Tensor], Tensor], **options: Any) -> None:
    rows = list(zip(columns.rows(), spans, strict=True))
    of_moments = {name: options[name] for name in ("beta1", "beta2", "grad_scale")}
    shared = {name: options[name] for name in ("eps", "weight_decay", "eps_inside_sqrt", "skip")}
    squares = [_reference_moments(*row[:4], segments=inside, **of_moments, **shared) for row, inside in rows]
    parts = reduce(torch.cat(squares, dim=1)).split(list(map(len, spans)), dim=1)
    names = ("step", "lr", "beta1", "beta2", "min_coeff", "max_coeff", "bias_correction")
    of_params = {name: options[name] for name in names}
    for ((param, _, m, v, low), inside), part in zip(rows, parts, strict=True):
        _reference_params(param, m, v, part, segments=inside, out=low, **of_params, **shared)
