"""LAMB over a flat slice of many parameters, in place, in two passes; norms may be summed over ranks in between.

    g = grad / grad_scale
    m = m + (1 - beta1) * (g - m)                v = v + (1 - beta2) * (g^2 - v)
    u = m / (sqrt(v) + eps) + weight_decay * p                eps_inside_sqrt: m / sqrt(v + eps)
    c = clamp(|p| / |u|, min_coeff, max_coeff)                1 where either norm is 0; per parameter
    p = p - rate * c * u                         rate = lr * sqrt(1 - beta2^n) / (1 - beta1^n), n = step + 1

All (N,), cut into tiles that lie in one parameter each. The first pass (`lamb_moments`) updates m and v and returns
|p|^2 and |u|^2, the second (`lamb_params`) computes u again and updates p. Squares are summed in float64, within a tile
and then over tiles in order: deterministic, and equal to some 1e-16 for any slicing of a parameter.
Padding is neither read nor written.

Moves: 40 bytes per element in float32 with 16-bit gradient and copy: reads p, g, m, v, writes m, v; then reads p, m, v,
writes p, out. (Storing u between the passes would move as many, and take memory.)
Source: You et al. 2020, arXiv:1904.00962, algorithm 2; clamping and the correction of the rate rather than of the
moments are DeepSpeed's FusedLamb.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fds.errors import KernelError
from fds.kernels.choice import runs_triton
from fds.kernels.language import current_stream, is_capturing, jit, on, tl, to_device
from fds.kernels.optimizers import flat
from fds.kernels.optimizers.flat import LAUNCH

Spans = Sequence[tuple[int, int]]


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
        p, g, m, v = flat.wide(*(_cut(x, span) for x in (param, grad, exp_avg, exp_avg_sq)))
        if grad_scale is not None:
            g = g / grad_scale
        m = (m + (1 - beta1) * (g - m)).to(exp_avg.dtype)
        v = (v + (1 - beta2) * (g * g - v)).to(exp_avg_sq.dtype)
        u = _direction(p, m.to(p.dtype), v.to(p.dtype), eps, weight_decay, eps_inside_sqrt)
        both[0, i], both[1, i] = p.double().square().sum(), u.double().square().sum()
        flat.write(_cut(exp_avg, span), m, skip)
        flat.write(_cut(exp_avg_sq, span), v, skip)
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
        p, m, v = flat.wide(*(_cut(x, span) for x in (param, exp_avg, exp_avg_sq)))
        u = _direction(p, m, v, eps, weight_decay, eps_inside_sqrt)
        flat.write(_cut(param, span), p - rate * trust[i] * u, skip)
        if out is not None:
            flat.write(_cut(out, span), _cut(param, span), skip)


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
    param_ptr, grad_ptr, m_ptr, v_ptr, sums_ptr, scale_ptr, skip_ptr, at, inside, fresh1, fresh2, eps, weight_decay,
    EPS_INSIDE: tl.constexpr,
):
    p = tl.load(param_ptr + at, mask=inside).to(tl.float32)
    m = tl.load(m_ptr + at, mask=inside).to(tl.float32)
    v = tl.load(v_ptr + at, mask=inside).to(tl.float32)
    g = flat.gradient(grad_ptr, at, inside, scale_ptr)
    m = flat.blend(m, g, fresh1).to(m_ptr.dtype.element_ty)
    v = flat.blend(v, g * g, fresh2).to(v_ptr.dtype.element_ty)
    mask = flat.written(inside, skip_ptr)
    tl.store(m_ptr + at, m, mask=mask)
    tl.store(v_ptr + at, v, mask=mask)
    u = _toward(p, m.to(tl.float32), v.to(tl.float32), eps, weight_decay, EPS_INSIDE).to(tl.float64)
    p = p.to(tl.float64)
    p2, u2 = p * p, u * u
    if inside is not None:
        p2, u2 = tl.where(inside, p2, 0.0), tl.where(inside, u2, 0.0)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(p2))
    tl.store(sums_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(u2))


@jit
def _moments_kernel(
    param_ptr, grad_ptr, m_ptr, v_ptr, sums_ptr, tiles_ptr, scale_ptr, skip_ptr, fresh1, fresh2, eps, weight_decay,
    EPS_INSIDE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):
    tile = tiles_ptr + tl.program_id(0) * 4
    block, low, high = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    lane = tl.arange(0, BLOCK)
    at = tl.max_contiguous(block.to(tl.int64) * BLOCK + lane, VECTOR)
    if high - low == BLOCK:
        _moments(param_ptr, grad_ptr, m_ptr, v_ptr, sums_ptr, scale_ptr, skip_ptr, at, None,
                 fresh1, fresh2, eps, weight_decay, EPS_INSIDE)
    else:
        _moments(param_ptr, grad_ptr, m_ptr, v_ptr, sums_ptr, scale_ptr, skip_ptr, at, (lane >= low) & (lane < high),
                 fresh1, fresh2, eps, weight_decay, EPS_INSIDE)


@jit(do_not_specialize=["num_tiles"])
def _sum_kernel(sums_ptr, firsts_ptr, squares_ptr, num_tiles, CHUNK: tl.constexpr):
    segment, which = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(firsts_ptr + segment), tl.load(firsts_ptr + segment + 1)
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
    flat.store(param_ptr, out_ptr, at, p - rate * u, flat.written(inside, skip_ptr))


@jit(do_not_specialize=["row"])
def _params_kernel(
    param_ptr, m_ptr, v_ptr, out_ptr, tiles_ptr, squares_ptr, step_ptr, lr_ptr, skip_ptr, row,
    log_beta1, log_beta2, eps, weight_decay, min_coeff, max_coeff,
    EPS_INSIDE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):
    # begin with the last tile, whose moments the first pass wrote last: they may still be in cache
    tile = tiles_ptr + (tl.num_programs(0) - 1 - tl.program_id(0)) * 4
    block, low, high, segment = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    p_norm = tl.sqrt(tl.load(squares_ptr + segment))
    u_norm = tl.sqrt(tl.load(squares_ptr + row + segment))
    there = (p_norm > 0) & (u_norm > 0)
    trust = tl.minimum(tl.maximum((p_norm / tl.where(there, u_norm, 1.0)).to(tl.float32), min_coeff), max_coeff)
    n = tl.load(step_ptr) + 1
    rate = tl.load(lr_ptr).to(tl.float32) * tl.sqrt(flat.correction(n, log_beta2)) / flat.correction(n, log_beta1)
    rate *= tl.where(there, trust, 1.0)
    lane = tl.arange(0, BLOCK)
    at = tl.max_contiguous(block.to(tl.int64) * BLOCK + lane, VECTOR)
    if high - low == BLOCK:
        _params(param_ptr, m_ptr, v_ptr, out_ptr, skip_ptr, at, None, rate, eps, weight_decay, EPS_INSIDE)
    else:
        inside = (lane >= low) & (lane < high)
        _params(param_ptr, m_ptr, v_ptr, out_ptr, skip_ptr, at, inside, rate, eps, weight_decay, EPS_INSIDE)


@functools.lru_cache(maxsize=256)
def _tiles(
    segments: tuple[tuple[int, int], ...], block: int, device: torch.device, stream: int
) -> tuple[Tensor, Tensor]:
    """Return the table of tiles (T, 4), and the first tile of every segment (S + 1,), int32 on the device.

    A tile is (block, low, high, segment): the elements [low, high) of a block, whose start is a multiple of its
    size, so that the compiler knows the alignment. Made and copied once per layout and stream, and read on that stream.

    Raises `KernelError` where a CUDA graph is captured, whose replays would copy from memory that was freed since.
    """
    if is_capturing(device):
        raise KernelError("a CUDA graph cannot capture the first update of a layout", where="segments",
                          got=f"{len(segments)} of them, now first seen", want="a step before the capture")
    offset, length = torch.tensor(segments, dtype=torch.int64, device="cpu").view(-1, 2).T  # not on the default
    begin, end = offset // block, -(-(offset + length) // block)
    counts = torch.where(length > 0, end - begin, 0)
    firsts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    segment = torch.repeat_interleave(counts)  # counts[0] times 0, then counts[1] times 1, ...
    blocks = begin[segment] + torch.arange(len(segment), device="cpu") - firsts[segment]
    low = (offset[segment] - blocks * block).clamp(min=0)
    high = (offset[segment] + length[segment] - blocks * block).clamp(max=block)
    tiles = torch.stack([blocks, low, high, segment], dim=1)
    return to_device(tiles.int(), device), to_device(firsts.int(), device)


def _checked(segments: Spans, size: int) -> tuple[tuple[int, int], ...]:
    spans = tuple((offset, length) for offset, length in segments)
    _check(spans, size)
    return spans


@functools.lru_cache(maxsize=256)
def _check(spans: tuple[tuple[int, int], ...], size: int) -> None:
    last = 0
    for (offset, length), i in sorted(zip(spans, range(len(spans)), strict=True)):
        if offset < 0 or length < 0 or offset + length > size:
            raise KernelError("a segment does not lie in the slice", where=f"segments[{i}]",
                              got=f"(offset {offset}, length {length})", want=f"inside {size} elements")
        if length and offset < last:
            raise KernelError("a segment overlaps another", where=f"segments[{i}]",
                              got=f"offset {offset}", want=f"{last} or more")
        last = max(last, offset + length)


@torch.no_grad()
def lamb_moments(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, segments: Spans, beta1: float, beta2: float,
    eps: float, weight_decay: float, eps_inside_sqrt: bool = False, grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
) -> Tensor:
    """Update the moments of a flat slice in place, and return the squared norms that `lamb_params` needs.

    Arguments are those of `lamb`. The result is (2, S) float64 for S segments: |p|^2 and |u|^2 over this slice, 0 for
    segments of length 0. Ranks that hold parts of the same parameters sum theirs.

    Raises `KernelError`, naming the argument, for any other shape, dtype, device or range.
    """
    flat.slices(param, read={"grad": grad}, written={"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})
    flat.scalars(param, grad_scale=grad_scale, skip=skip)
    flat.numbers(eps=eps, weight_decay=weight_decay)
    flat.numbers(beta1=beta1, beta2=beta2, high=1.0)
    spans = _checked(segments, param.numel())
    if not runs_triton("lamb", param):
        return _reference_moments(
            param, grad, exp_avg, exp_avg_sq, segments=spans, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, eps_inside_sqrt=eps_inside_sqrt, grad_scale=grad_scale, skip=skip,
        )
    squares = param.new_empty(2, len(spans), dtype=torch.float64)
    if not spans:
        return squares
    meta = LAUNCH[param.element_size()]
    tiles, firsts = _tiles(spans, meta["BLOCK"], param.device, current_stream(param.device))
    sums = param.new_empty(2, len(tiles), dtype=torch.float64)
    with on(param):
        if len(tiles):
            _moments_kernel[(len(tiles),)](
                param, grad.contiguous(), exp_avg, exp_avg_sq, sums, tiles, grad_scale, skip, 1 - beta1, 1 - beta2,
                eps, weight_decay, EPS_INSIDE=eps_inside_sqrt, **meta,
            )
        _sum_kernel[(len(spans), 2)](sums, firsts, squares, len(tiles), CHUNK=1024)
    return squares


@torch.no_grad()
def lamb_params(
    param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, squares: Tensor, *, segments: Spans, step: Tensor, lr: Tensor,
    beta1: float, beta2: float, eps: float, weight_decay: float, min_coeff: float, max_coeff: float,
    bias_correction: bool = True, eps_inside_sqrt: bool = False, skip: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Update the parameters of a flat slice in place, after `lamb_moments`.

    Arguments are those of `lamb`; `squares` (2, S) float64: |p|^2 and |u|^2 of whole parameters.

    Raises `KernelError`, naming the argument, for any other shape, dtype, device or range.
    """
    flat.slices(param, read={}, written={"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "out": out})
    flat.scalars(param, step=step, lr=lr, skip=skip)
    flat.numbers(eps=eps, weight_decay=weight_decay, min_coeff=min_coeff, max_coeff=max_coeff)
    flat.numbers(beta1=beta1, beta2=beta2, high=1.0)
    spans = _checked(segments, param.numel())
    if squares.shape != (2, len(spans)) or squares.dtype != torch.float64 or squares.device != param.device:
        raise KernelError("squares are not those of the segments", where="squares",
                          got=f"{tuple(squares.shape)} {squares.dtype} on {squares.device}",
                          want=f"(2, {len(spans)}) torch.float64 on {param.device}")
    if not runs_triton("lamb", param):
        return _reference_params(
            param, exp_avg, exp_avg_sq, squares, segments=spans, step=step, lr=lr, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, min_coeff=min_coeff, max_coeff=max_coeff, bias_correction=bias_correction,
            eps_inside_sqrt=eps_inside_sqrt, skip=skip, out=out,
        )
    if not any(length for _, length in spans):
        return None
    meta = LAUNCH[param.element_size()]
    tiles, _ = _tiles(spans, meta["BLOCK"], param.device, current_stream(param.device))
    squares = squares if squares.stride(1) == 1 else squares.contiguous()
    with on(param):
        _params_kernel[(len(tiles),)](
            param, exp_avg, exp_avg_sq, out, tiles, squares, step, lr, skip, squares.stride(0),
            flat.log_of(beta1, corrected=bias_correction), flat.log_of(beta2, corrected=bias_correction),
            eps, weight_decay, min_coeff, max_coeff, EPS_INSIDE=eps_inside_sqrt, **meta,
        )


def lamb(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, segments: Spans,
    step: Tensor, lr: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float,
    min_coeff: float, max_coeff: float, bias_correction: bool = True, eps_inside_sqrt: bool = False,
    grad_scale: Tensor | None = None, skip: Tensor | None = None, out: Tensor | None = None,
    reduce: Callable[[Tensor], Tensor] = lambda squares: squares,
) -> None:
    """Update the parameters of a flat slice and their moments in place, in three launches.

    Args:
        param: (N,) contiguous, float32 or 16 bit; arithmetic is in float32, norms in float64.
        grad: (N,) of any floating dtype, multiplied by `grad_scale`.
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
        reduce: squared norms (2, S) float64 of this slice -> those of whole parameters.

    Raises `KernelError`, naming the argument, for any other shape, dtype, device or range.
    """
    direction = {"segments": segments, "eps": eps, "weight_decay": weight_decay, "eps_inside_sqrt": eps_inside_sqrt}
    squares = reduce(lamb_moments(param, grad, exp_avg, exp_avg_sq, beta1=beta1, beta2=beta2, grad_scale=grad_scale,
                                  skip=skip, **direction))
    lamb_params(param, exp_avg, exp_avg_sq, squares, step=step, lr=lr, beta1=beta1, beta2=beta2, min_coeff=min_coeff,
                max_coeff=max_coeff, bias_correction=bias_correction, skip=skip, out=out, **direction)
