"""A row of logits: its maximum, its sum of exponentials and its loss, in one reading.

The equations are those of fds.kernels.losses._cross_entropy. Loads of 16 bytes must be aligned, and the rows of an odd
vocabulary (50257 of 2 bytes) are not: a row is an aligned part, read in vectors, and less than 16 bytes at either end.
Source: Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3: maximum and sum in one pass.
"""

from __future__ import annotations

from torch import Tensor

from fds.kernels.language import jit, tl

LOWEST = tl.constexpr(-3.4028234663852886e38) if tl else None  # finite: two minus infinities have no difference
FLAT = tl.constexpr(-200.0) if tl else None  # exp of it is 0


@jit
def exp(x):
    """Return e^x for x <= 0, in two instructions: tl.exp takes three more for results below 1e-38, here 0."""
    return tl.exp2(1.4426950408889634 * x)


@jit
def middle(base, num_classes, VECTOR: tl.constexpr):
    """Return the first element of the aligned part of a row, a multiple of VECTOR, and the part's length."""
    first = (base + VECTOR - 1) // VECTOR * VECTOR
    last = (base + num_classes) // VECTOR * VECTOR
    return first, (tl.maximum(last, first) - first).to(tl.int32)


@jit
def ends(base, first, length, num_classes, VECTOR: tl.constexpr):
    """Return the columns (2 * VECTOR,) before and after the aligned part of a row, and a mask of those in the row."""
    lane = tl.arange(0, 2 * VECTOR)
    before = (first - base).to(tl.int32)  # may exceed a row without an aligned part
    column = tl.where(lane < VECTOR, lane, before + length + lane - VECTOR)
    return column, (column < num_classes) & ((lane >= VECTOR) | (lane < before))


@jit
def row_loss(
    logits_ptr, base, target, is_taken, num_classes, smoothing, z_loss,
    SMOOTHED: tl.constexpr, VECTOR: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Return the loss of a row that starts at `base`, its maximum m and log-sum l, and the logit of its target."""
    is_inside = (target >= 0) & (target < num_classes)
    at_target = tl.load(logits_ptr + base + target, mask=is_inside & is_taken, other=0.0).to(tl.float32)
    first, length = middle(base, num_classes, VECTOR)
    # Each lane has its own maximum, so that lanes synchronise once per row, not once per tile. It takes one vector of a
    # tile at a time, whose sum it rescales once: 7 instructions an element, one of them the exp.
    lane = VECTOR * tl.arange(0, BLOCK // VECTOR)
    maximum = tl.full((BLOCK // VECTOR,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK // VECTOR,), tl.float32)
    plain = tl.zeros((BLOCK // VECTOR,), tl.float32)
    for start in range(0, tl.where(is_taken, length, 0), BLOCK):
        at = (start + lane)[:, None] + tl.arange(0, VECTOR)[None, :]
        inside = (start + lane < length)[:, None]  # the part's length is a number of vectors
        x = tl.load(logits_ptr + first + at, mask=inside, other=-float("inf")).to(tl.float32)
        above = tl.maximum(maximum, tl.max(x, 1))
        total = total * exp(tl.maximum(maximum - above, FLAT)) + tl.sum(exp(x - above[:, None]), 1)
        maximum = above
        if SMOOTHED:
            plain += tl.sum(tl.where(inside, x, 0.0), 1)
    top = tl.max(maximum, 0)
    if ENDS:
        column, inside = ends(base, first, length, num_classes, VECTOR)
        x = tl.load(logits_ptr + base + column, mask=tl.where(is_taken, inside, False), other=-float("inf"))
        x = x.to(tl.float32)
        top = tl.maximum(top, tl.max(x, 0))
    among = tl.sum(total * exp(tl.maximum(maximum - top, FLAT)), 0)
    if ENDS:
        among += tl.sum(exp(x - top), 0)
    top = tl.where(is_taken, top, 0.0)
    log_sum = tl.log(tl.where(is_taken, among, 1.0))
    lse = top + log_sum
    loss = log_sum + (1 - smoothing) * (top - at_target) + z_loss * lse * lse
    if SMOOTHED:
        every = tl.sum(plain, 0)
        if ENDS:
            every += tl.sum(tl.where(inside, x, 0.0), 0)
        loss += smoothing * (top - every / num_classes)
    loss = tl.where(is_inside, loss, float("nan"))
    return tl.where(is_taken, loss, 0.0), top, log_sum, at_target


def vectors(logits: Tensor) -> dict[str, int]:
    """Return what a kernel must know of rows: elements of a vector, and whether any may lie outside of vectors."""
    vector = 16 // logits.element_size()
    return {"VECTOR": vector, "ENDS": logits.stride(0) % vector != 0 or logits.shape[1] % vector != 0}
