"""Backward of normalisation of long rows, whose weight's gradient no program could hold beside a row.

Two kinds of programs share a launch, and the rows that they read: one takes a row, reads it for its means and again for
dx; one takes TILE columns of SLAB rows and sums their part of dweight and dbias, for which forward's mean and 1 / std
suffice. They do not wait for each other. All that belongs to a slab follows each other in the order of tasks, through
which few persistent programs go, so that whoever comes second finds the slab in the L2 cache.

Moves: dy, x and (if the sum has a gradient) ds once, and dx, through memory; dy and x three times through L2, once of
them from L1 where the rows in use fit there (16384 columns in 16 bits); and 16 / SLAB bytes an element of partial sums.
Rows of more than 256 KB of dy and x (65536 columns in 16 bits) are read from memory again in part: at worst 7 tensors
instead of 3.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fds.kernels.language import cdiv, jit, num_processors, tl
from fds.kernels.norms.normalization_parts import parameter, unscaled

SLAB = 64  # rows: partial sums add 4% to what 16 bits move
# Derived, not measured: elements that a program loads at once, eight per thread, which leave it within 64 registers.
CHUNK = {"CHUNK": 4096, "TILE": 1024, "num_warps": 8}
# By bytes of a row of dy and x together: programs per multiprocessor, so that the rows in use are 25 MB, or 34 MB, of
# the 50 MB of L2.
RESIDENT = {2**16: 3, 2**17: 2, 2**63: 1}


@jit
def _inside(column, n, EVEN: tl.constexpr):
    """Return which columns are in a row; with EVEN all are, and the compiler drops the masks."""
    return tl.full(column.shape, True, tl.int1) if EVEN else column < n


@jit
def _loaded(dy_ptr, x_ptr, mean, weight, bias, n, inside, INVERTIBLE: tl.constexpr, WEIGHT: tl.constexpr,
            BIAS: tl.constexpr):
    """Return dy, and x - mean or, with INVERTIBLE, x_hat."""
    dy = tl.load(dy_ptr, mask=inside, other=0).to(tl.float32)
    x = tl.load(x_ptr, mask=inside, other=0).to(tl.float32)
    return dy, unscaled(x, weight, bias, n, WEIGHT, BIAS) if INVERTIBLE else x - mean


@jit
def _weighted(dy_ptr, x_ptr, weight_ptr, bias_ptr, mean, column, inside, n, INVERTIBLE: tl.constexpr):
    """Return the gradient of x_hat in some columns of a row, and x - mean or, with INVERTIBLE, x_hat."""
    weight = parameter(weight_ptr, column, inside, 1.0)
    bias = parameter(bias_ptr, column, inside, 0.0) if INVERTIBLE else 0.0
    g, x = _loaded(
        dy_ptr + column, x_ptr + column, mean, weight, bias, n, inside, INVERTIBLE, weight_ptr is not None,
        bias_ptr is not None,
    )
    if weight_ptr is not None:
        g *= weight
    return g, x


@jit
def _row(
    dy_ptr, x_ptr, mean_ptr, r_ptr, weight_ptr, bias_ptr, dtotal_ptr, dx_ptr, row, n,
    CENTERED: tl.constexpr, INVERTIBLE: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr,
):
    """Write dx of a row."""
    lane = tl.arange(0, CHUNK)
    r = tl.load(r_ptr + row)
    mean = tl.load(mean_ptr + row) if CENTERED and not INVERTIBLE else 0.0
    scale = 1.0 if INVERTIBLE else r  # of what _loaded returns, to x_hat
    dy_ptr, x_ptr, dx_ptr = dy_ptr + row * n, x_ptr + row * n, dx_ptr + row * n
    gs = tl.zeros([CHUNK], tl.float32)
    products = tl.zeros([CHUNK], tl.float32)
    for first in range(0, n, CHUNK):
        column = first + lane
        inside = _inside(column, n, EVEN)
        g, x = _weighted(dy_ptr, x_ptr, weight_ptr, bias_ptr, mean, column, inside, n, INVERTIBLE)
        gs += g
        products += g * x  # beyond the row g is 0
    of_g, of_x = r, -r * scale * scale * (tl.sum(products) / n)
    of_one = -r * (tl.sum(gs) / n) if CENTERED else 0.0
    for first in range(0, n, CHUNK):
        column = first + lane
        inside = _inside(column, n, EVEN)
        g, x = _weighted(dy_ptr, x_ptr, weight_ptr, bias_ptr, mean, column, inside, n, INVERTIBLE)
        dx = of_g * g + (of_x * x + of_one)
        if dtotal_ptr is not None:
            dx += tl.load(dtotal_ptr + row * n + column, mask=inside, other=0).to(tl.float32)
        tl.store(dx_ptr + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@jit
def _columns(
    dy_ptr, x_ptr, mean_ptr, r_ptr, weight_ptr, bias_ptr, partial_ptr, slab, slabs, tile, rows, n,
    CENTERED: tl.constexpr, INVERTIBLE: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, SLAB: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):
    """Write the sums over a slab of rows for TILE columns."""
    column = (tile * TILE + tl.arange(0, TILE))[None, :]
    weight = parameter(weight_ptr, column, column < n, 1.0) if INVERTIBLE else 1.0
    bias = parameter(bias_ptr, column, column < n, 0.0) if INVERTIBLE else 0.0
    start, left = slab * SLAB, rows - slab * SLAB
    dy_ptr, x_ptr, r_ptr = dy_ptr + start * n, x_ptr + start * n, r_ptr + start
    dweight = tl.zeros([ROWS, TILE], tl.float32)
    dbias = tl.zeros([ROWS, TILE], tl.float32)
    for step in range(0, SLAB, ROWS):
        row = step + tl.arange(0, ROWS)
        at = row[:, None] * n + column  # below 2^31
        inside = (row < left)[:, None] & (column < n)
        mean = 0.0
        if CENTERED and not INVERTIBLE:
            mean = tl.load(mean_ptr + start + row, mask=row < left, other=0)[:, None]
        dy, x = _loaded(
            dy_ptr + at, x_ptr + at, mean, weight, bias, n, inside, INVERTIBLE, weight_ptr is not None,
            bias_ptr is not None,
        )
        if DWEIGHT:
            scaled = dy
            if not INVERTIBLE:
                scaled = dy * tl.load(r_ptr + row, mask=row < left, other=0)[:, None]
            dweight += scaled * x
        if DBIAS:
            dbias += dy
    mine = partial_ptr + slab * n + column
    if DWEIGHT:
        tl.store(mine, tl.sum(dweight, axis=0)[None, :], mask=column < n)
        mine += slabs.to(tl.int64) * n
    if DBIAS:
        tl.store(mine, tl.sum(dbias, axis=0)[None, :], mask=column < n)


@jit(do_not_specialize=("rows", "units", "slabs", "tiles"))
def _kernel(
    dy_ptr, x_ptr, mean_ptr, r_ptr, weight_ptr, bias_ptr, dtotal_ptr, dx_ptr, partial_ptr, rows, units, slabs, tiles,
    CENTERED: tl.constexpr, INVERTIBLE: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, UNIT: tl.constexpr,
    SLAB: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr,
):
    """Take every so many-th task: of each slab first its rows, then its tiles of columns."""
    n = units * UNIT
    for task in range(tl.program_id(0), slabs * (SLAB + tiles), tl.num_programs(0)):
        slab = (task // (SLAB + tiles)).to(tl.int64)
        part = task % (SLAB + tiles)
        row = slab * SLAB + part
        if part >= SLAB:
            _columns(
                dy_ptr, x_ptr, mean_ptr, r_ptr, weight_ptr, bias_ptr, partial_ptr, slab, slabs, part - SLAB, rows, n,
                CENTERED, INVERTIBLE, DWEIGHT, DBIAS, SLAB, CHUNK // TILE, TILE,
            )
        elif row < rows:
            _row(
                dy_ptr, x_ptr, mean_ptr, r_ptr, weight_ptr, bias_ptr, dtotal_ptr, dx_ptr, row, n, CENTERED, INVERTIBLE,
                CHUNK, EVEN,
            )


def launch(
    dy: Tensor, x: Tensor, mean: Tensor | None, r: Tensor, weight: Tensor | None, bias: Tensor | None,
    dtotal: Tensor | None, dx: Tensor, num_sums: int, modes: dict[str, Any],
) -> Tensor:
    """Write dx and return partial sums (num_sums, slabs, N) of dweight and dbias in float32."""
    rows, columns = r.numel(), x.shape[-1]
    slabs, tiles = cdiv(rows, SLAB), cdiv(columns, CHUNK["TILE"]) if num_sums else 0
    nbytes = columns * (dy.element_size() + x.element_size())
    resident = RESIDENT[min(most for most in RESIDENT if nbytes <= most)]
    partial = r.new_empty(num_sums, slabs, columns)
    _kernel[(min(slabs * (SLAB + tiles), resident * num_processors(x.device)),)](
        dy, x, mean, r, weight, bias, dtotal, dx, partial, rows, columns // modes["UNIT"], slabs, tiles, **modes,
        SLAB=SLAB, EVEN=columns % CHUNK["CHUNK"] == 0, **CHUNK,
    )
    return partial
