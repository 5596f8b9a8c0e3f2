"""Products and sums whose elements do not depend on how many others there are, nor on where they stand.

A library multiplies matrices by other kernels for other numbers of rows, and cuts sums where it likes. Here it is given
tiles of one shape, padded with zeros, at aligned addresses: the same kernel each time. That this one computes all rows
and columns of a tile alike is not taken for granted: it is tried when a shape is first met, and where it is not so,
elements are multiplied and added one by one. Sums are trees of additions, of which zeros at the end change no bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, COLUMNS = 64, 256  # of a tile of a matrix product; inner dims are padded to multiples of ROWS
TILE, GROUP = 64, 16  # of batched products, in all three dims; and how many in one call
_ELEMENTS = 2**22  # that are multiplied one by one at a time
_alike: dict[tuple[object, ...], bool] = {}  # by kind of tile, whether all of its rows and columns are computed alike


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Return a (M, K) @ b (K, N), contiguous; element (i, j) follows from row i of a and column j of b alone."""
    (m, k), n = a.shape, b.shape[1]
    inner = _up(k, ROWS)
    out = a.new_empty(m, n)
    if not _is_alike(a, inner):
        return _one_by_one(a, b)
    left = _padded(a, _up(m, ROWS), inner)
    for j in range(0, n, COLUMNS):
        right = _padded(b[:, j : j + COLUMNS].T, COLUMNS, inner).T
        width = min(COLUMNS, n - j)
        for i in range(0, m, ROWS):
            height = min(ROWS, m - i)
            out[i : i + height, j : j + width] = torch.mm(left[i : i + ROWS], right)[:height, :width]
    return out


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return a (n, M, K) @ b (n, K, N), contiguous; zeros at the end of K change no bit.

    Each tile of K is added to those before it, 16-bit ones in float32.
    """
    count, m, n = a.shape[0], a.shape[1], b.shape[2]
    wide = torch.float32 if a.dtype.itemsize == 2 else a.dtype
    if not _are_alike(a.new_empty(0, dtype=wide)):
        return torch.stack([_one_by_one(x, y) for x, y in zip(a, b, strict=True)]) if count else a.new_empty(0, m, n)
    shape = count, _up(m, TILE) // TILE, _up(n, TILE) // TILE
    left = _tiles(a.to(wide)).transpose(2, 3)  # (n, m tiles, k tiles, TILE, TILE)
    right = _tiles(b.to(wide)).transpose(2, 3).transpose(1, 2)  # (n, n tiles, k tiles, TILE, TILE)
    places = torch.arange(count * shape[1] * shape[2], device=a.device)
    at = places // (shape[1] * shape[2]), places // shape[2] % shape[1], places % shape[2]
    out = torch.zeros(_up(len(places), GROUP), TILE, TILE, dtype=wide, device=a.device)
    x, y = (torch.zeros(GROUP, TILE, TILE, dtype=wide, device=a.device) for _ in range(2))
    for start in range(0, len(places), GROUP):
        i, p, q = (index[start : start + GROUP] for index in at)
        group = out[start : start + GROUP]
        for t in range(left.shape[2]):
            x[: len(i)], y[: len(i)] = left[i, p, t], right[i, q, t]
            group += torch.bmm(x, y)
    whole = out[: len(places)].view(*shape, TILE, TILE).transpose(2, 3).reshape(count, shape[1] * TILE, -1)
    return whole[:, :m, :n].to(a.dtype).contiguous()


def total(x: Tensor) -> Tensor:
    """Return the sum over the last dim (..., n): halves are added until one element is left."""
    n = x.shape[-1]
    if not n:
        return x.new_zeros(x.shape[:-1])
    size = 1 << (n - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, size - n)) if size > n else x
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """Return new contiguous memory with a matrix at its start, and zeros."""
    out = x.new_zeros(rows, columns)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def _tiles(x: Tensor) -> Tensor:
    """Return (n, M, N) as (n, tiles, TILE, tiles, TILE), padded with zeros."""
    n, rows, columns = x.shape
    out = x.new_zeros(n, _up(rows, TILE), _up(columns, TILE))
    out[:, :rows, :columns] = x
    return out.view(n, out.shape[1] // TILE, TILE, out.shape[2] // TILE, TILE)


def _one_by_one(a: Tensor, b: Tensor) -> Tensor:
    """Return a (M, K) @ b (K, N) by elementwise products and their sums."""
    wide = torch.float32 if a.dtype.itemsize == 2 else a.dtype
    out, columns = a.new_empty(a.shape[0], b.shape[1]), b.T.contiguous().to(wide)
    step = max(1, _ELEMENTS // max(1, columns.numel()))
    for i in range(0, len(a), step):
        out[i : i + step] = total(a[i : i + step, None].to(wide) * columns)
    return out


def _is_alike(like: Tensor, inner: int) -> bool:
    """Say whether a product of tiles of a dtype and an inner dim computes all rows alike, and all columns."""
    key = "mm", like.dtype, like.device, inner, torch.get_num_threads()
    if key not in _alike:
        draw = torch.Generator().manual_seed(0)
        a, b = (torch.randn(n, inner, generator=draw).to(like) for n in (ROWS, COLUMNS))
        rows = torch.mm(a[:1].expand(ROWS, inner).contiguous(), b.T)
        columns = torch.mm(a, b[:1].expand(COLUMNS, inner).contiguous().T)
        _alike[key] = bool((rows == rows[:1]).all()) and bool((columns == columns[:, :1]).all())
    return _alike[key]


def _are_alike(like: Tensor) -> bool:
    """Say the same of a group of tiles."""
    key = "bmm", like.dtype, like.device, torch.get_num_threads()
    if key not in _alike:
        draw = torch.Generator().manual_seed(0)
        a, b = (torch.randn(TILE, TILE, generator=draw).to(like) for _ in range(2))
        shape = GROUP, TILE, TILE
        rows = torch.bmm(a[:1].expand(shape).contiguous(), b.expand(shape).contiguous())
        columns = torch.bmm(a.expand(shape).contiguous(), b[:, :1].expand(shape).contiguous())
        _alike[key] = bool((rows == rows[:1, :1]).all()) and bool((columns == columns[:1, :, :1]).all())
    return _alike[key]
