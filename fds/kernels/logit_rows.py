"""A row of logits: its maximum, its sum of exponentials and its loss, in one reading; and its gradient in its place.

The equations are those of fds.kernels.token_loss. Loads of 16 bytes must be aligned, and the rows of an odd
vocabulary (50257 of 2 bytes) are not: a row is an aligned part, read in vectors, and less than 16 bytes at either end.
Source: Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3: maximum and sum in one pass.

The loss with its gradient, with dloss = 1, takes one pass through memory. A program reads its row for the maximum
and the sum, then again for the gradient. Two programs of 32 warps run on a multiprocessor, so that on an H200 264 rows
are in use: 26 MB of 50257 classes in 16 bits, which its L2 of 50 MB still holds when they are read again.

Moves: logits are read once and their gradient is written once; the second reading comes from L2 (of rows beyond 180 KB
in part from memory: at worst 3 tensors instead of 2). Rows of ignored tokens are not read. Saves: nothing.
"""

from __future__ import annotations

from torch import Tensor

from fds.kernels.language import jit, next_power_of_2, on, tl

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
        logit_sum = tl.sum(plain, 0)
        if ENDS:
            logit_sum += tl.sum(tl.where(inside, x, 0.0), 0)
        loss += smoothing * (top - logit_sum / num_classes)
    loss = tl.where(is_inside, loss, float("nan"))
    return tl.where(is_taken, loss, 0.0), top, log_sum, at_target


def vectors(logits: Tensor) -> dict[str, int]:
    """Return what a kernel must know of rows: elements of a vector, and whether any may lie outside of vectors."""
    vector = 16 // logits.element_size()
    return {"VECTOR": vector, "ENDS": logits.stride(0) % vector != 0 or logits.shape[1] % vector != 0}


# Eight elements per thread and a load of 16 bytes in 16 bits, as many warps as a program may have; smaller vocabularies
# take fewer. A larger block would leave more of the last one empty: 50257 classes are 6.1 of these. Derived, not
# measured.
LAUNCH = {"BLOCK": 8192, "per_thread": 8}


@jit
def _gradient_kernel(
    logits_ptr, targets_ptr, loss_ptr, row_stride, num_classes, smoothing, z_loss, ignore_index,
    SMOOTHED: tl.constexpr, VECTOR: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = row * row_stride
    target = tl.load(targets_ptr + row)
    is_taken = target != ignore_index
    loss, top, log_sum, at_target = row_loss(
        logits_ptr, base, target, is_taken, num_classes, smoothing, z_loss, SMOOTHED, VECTOR, ENDS, BLOCK
    )
    tl.store(loss_ptr + row, loss)
    is_inside = (target >= 0) & (target < num_classes)
    dloss = tl.where(is_taken, tl.where(is_inside, 1.0, float("nan")), 0.0)
    of_probability, of_every = dloss * (1 + 2 * z_loss * (top + log_sum)), dloss * (smoothing / num_classes)
    tl.debug_barrier()  # all have read the row before it is overwritten, by other threads
    first, length = middle(base, num_classes, VECTOR)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        # not `is_taken &`: Triton 3.9's interpreter makes integers of one boolean that is joined to many
        is_read = tl.where(is_taken, at < length, False)
        x = tl.load(logits_ptr + first + at, mask=is_read, other=-float("inf"), eviction_policy="evict_first")
        dx = exp(x.to(tl.float32) - top - log_sum) * of_probability - of_every
        tl.store(logits_ptr + first + at, dx.to(logits_ptr.dtype.element_ty), mask=at < length)
    if ENDS:
        column, inside = ends(base, first, length, num_classes, VECTOR)
        is_read = tl.where(is_taken, inside, False)
        x_end = tl.load(logits_ptr + base + column, mask=is_read, other=-float("inf")).to(tl.float32)
        dx_end = exp(x_end - top - log_sum) * of_probability - of_every
        tl.store(logits_ptr + base + column, dx_end.to(logits_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # the target's column is overwritten once more, after the thread that has it
    of_target = exp(at_target - top - log_sum) * of_probability - of_every - dloss * (1 - smoothing)
    tl.store(logits_ptr + base + target, of_target.to(logits_ptr.dtype.element_ty), mask=is_inside & is_taken)


def launch_with_gradient(
    logits: Tensor, targets: Tensor, loss: Tensor, label_smoothing: float, z_loss: float, ignore_index: int
) -> None:
    """Write loss (N,) in float32, and over logits (N, V), with contiguous rows of any stride, their gradient."""
    if not targets.numel():
        return
    block = min(max(next_power_of_2(logits.shape[1]), 512), LAUNCH["BLOCK"])
    with on(logits):
        _gradient_kernel[(targets.numel(),)](
            logits, targets, loss, logits.stride(0), logits.shape[1], label_smoothing, z_loss, ignore_index,
            SMOOTHED=label_smoothing > 0, **vectors(logits), BLOCK=block,
            num_warps=block // (32 * LAUNCH["per_thread"]),
        )
