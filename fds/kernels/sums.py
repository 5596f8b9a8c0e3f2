"""The sum of what messages say, in their order: numbers of 8, 4 or 1 bits times the scales of their groups.

    out = (...(s_0 q_0 + s_1 q_1) + ...) + s_k q_k in float32, with `own` in place of message `index`

No message is held as numbers: a block of all messages is summed, and then the next one.

Moves:  for W messages of 8 bits 1.02 W bytes and those of `out` for each number; 0.51 W in 4 bits, 1/8 W in signs
Source: the sums of all-to-alls in Wang et al. 2023, arXiv:2306.10209, section 4.3
"""

from __future__ import annotations

import torch
from torch import Tensor

from fds.kernels import arguments
from fds.kernels.choice import runs_triton
from fds.kernels.groups import ELEMENTS, blocks, opened, place, tile
from fds.kernels.language import cdiv, jit, on, tl
from fds.kernels.signs import signs_of

INTEGERS = {
    8: lambda codes: codes.view(torch.int8),
    4: lambda codes: torch.cat([codes & 15, codes >> 4], -1).view(torch.int8).sub_(8),
    1: signs_of,
}


def reference(
    messages: Tensor, out: Tensor, *, bits: int, group: int, own: Tensor | None = None, index: int = 0
) -> None:
    """Do the same in plain torch."""
    scales, codes = opened(messages, len(out), group=group, bits=bits)
    wide = arguments.width(out)
    is_exact = own is None and out.dtype == wide  # `own` may share memory with `out`
    for _, at, columns in blocks(1, len(out), group):
        part = out[columns]
        total = part if is_exact else torch.empty_like(part, dtype=wide)
        term = total if len(messages) == 1 else torch.empty_like(total)
        for r in range(len(messages)):
            into = term if r else total
            if own is not None and r == index:
                into.copy_(own[columns])
            elif len(part) % group:
                into.copy_((INTEGERS[bits](codes[r, at]) * scales[r, at, None])[0, : len(part)])
            else:
                torch.mul(INTEGERS[bits](codes[r, at]), scales[r, at, None], out=into.unflatten(0, (-1, group)))
            if r:
                total += term
        if total is not part:
            part.copy_(total)


@jit
def _sum_kernel(
    words_ptr, own_ptr, out_ptr, num_messages, index, n, count, group, message, own_stride, out_stride,
    BITS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):
    g = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    word, each = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[None, :], group * BITS // 32
    places, shift = place(word, group, BITS)
    at = g[:, None, None] * group + places
    read = (g[:, None] < count) & (word < each)
    inside = read[:, :, None] & (at < n)
    total = tl.full((ROWS, WORDS, 32 // BITS), 0.0, tl.float32)
    for r in range(num_messages):
        is_coded = r != index  # not joined to a mask by `&`, which Triton 3.9's interpreter makes integers of
        has_scale, has_codes = tl.where(is_coded, g < count, False), tl.where(is_coded, read, False)
        scale = tl.load(words_ptr + g, mask=has_scale, other=0).to(tl.float32, bitcast=True)
        codes = tl.load(words_ptr + count + g[:, None] * each + word, mask=has_codes, other=0)[:, :, None]
        if BITS == 8:
            q = (codes << (24 - shift)) >> 24
        elif BITS == 4:
            q = (codes >> shift & 15) - 8
        else:
            q = (codes >> shift & 1) * 2 - 1
        term = q.to(tl.float32) * scale[:, None, None]
        if own_ptr is not None:
            exact = tl.load(own_ptr + at * own_stride, mask=tl.where(is_coded, False, inside), other=0.0)
            term = tl.where(is_coded, term, exact.to(tl.float32))
        total = tl.where(r == 0, term, total + term)  # 0.0 + -0.0 is 0.0
        words_ptr += message
    tl.store(out_ptr + at * out_stride, total.to(out_ptr.dtype.element_ty), mask=inside)


@torch.no_grad()
def sum_messages(
    messages: Tensor, out: Tensor, *, bits: int, group: int, own: Tensor | None = None, index: int = 0
) -> None:
    """Write to `out` the sum, in float32 and in their order, of what messages of `quantize` or `pack_signs` say.

    Args:
        messages: (k, m) uint8, at least one, each of n numbers.
        out: (n,), of any floating dtype, to which the sum is rounded.
        bits: of a number: 8 or 4, or 1 for signs.
        group: numbers that share a scale.
        own: (n,) floating, which is added in place of message `index`, exact; or None.
        index: of the message that is not read.

    Raises `KernelError` for messages of another size.
    """
    if not len(out):
        return
    if not runs_triton("sum_messages", out):
        reference(messages, out, bits=bits, group=group, own=own, index=index)
        return
    opened(messages, len(out), group=group, bits=bits)
    count, words = cdiv(len(out), group), messages.view(torch.int32)
    meta = tile(bits, group, ELEMENTS)
    with on(out):
        _sum_kernel[(cdiv(count, meta["ROWS"]), cdiv(group * bits // 32, meta["WORDS"]))](
            words, own, out, len(messages), -1 if own is None else index, len(out), count, group, words.stride(0),
            1 if own is None else own.stride(0), out.stride(0), **meta, enable_fp_fusion=False,
        )


def dequantize(message: Tensor, out: Tensor, *, bits: int, group: int) -> None:
    """Write the numbers of a message (m,) uint8 to `out` (n,), of any floating dtype: see `quantize`.

    Raises `KernelError` for a message of another size.
    """
    sum_messages(message[None], out, bits=bits, group=group)


def unpack_signs(message: Tensor, out: Tensor, *, group: int) -> None:
    """Write the numbers of a message (m,) uint8 to `out` (n,), of any floating dtype: see `pack_signs`.

    Raises `KernelError` for a message of another size.
    """
    sum_messages(message[None], out, bits=1, group=group)
