"""The loss of each row of logits, and its gradient in place of the logits, in one pass through memory.

The equations are those of fds.kernels.losses._cross_entropy, with dloss = 1. A program reads its row for the maximum
and the sum, then again for the gradient. Two programs of 32 warps run on a multiprocessor, so that on an H200 264 rows
are in use: 26 MB of 50257 classes in 16 bits, which its L2 of 50 MB still holds when they are read again.

Moves: logits are read once and their gradient is written once; the second reading comes from L2 (of rows beyond 180 KB
in part from memory: at worst 3 tensors instead of 2). Rows of ignored tokens are not read. Saves: nothing.
"""

from __future__ import annotations

from torch import Tensor

from fds.kernels.language import jit, next_power_of_2, on, tl
from fds.kernels.losses import logit_rows

# Eight elements per thread and a load of 16 bytes in 16 bits, as many warps as a program may have; smaller vocabularies
# take fewer. A larger block would leave more of the last one empty: 50257 classes are 6.1 of these. Derived, not
# measured.
LAUNCH = {"BLOCK": 8192, "per_thread": 8}


@jit
def _kernel(
    logits_ptr, targets_ptr, loss_ptr, row_stride, num_classes, smoothing, z_loss, ignore_index,
    SMOOTHED: tl.constexpr, VECTOR: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = row * row_stride
    target = tl.load(targets_ptr + row)
    is_taken = target != ignore_index
    loss, top, log_sum, at_target = logit_rows.row_loss(
        logits_ptr, base, target, is_taken, num_classes, smoothing, z_loss, SMOOTHED, VECTOR, ENDS, BLOCK
    )
    tl.store(loss_ptr + row, loss)
    is_inside = (target >= 0) & (target < num_classes)
    dloss = tl.where(is_taken, tl.where(is_inside, 1.0, float("nan")), 0.0)
    of_probability, of_every = dloss * (1 + 2 * z_loss * (top + log_sum)), dloss * (smoothing / num_classes)
    tl.debug_barrier()  # all have read the row before it is overwritten, by other threads
    first, length = logit_rows.middle(base, num_classes, VECTOR)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        # not `is_taken &`: Triton 3.9's interpreter makes integers of one boolean that is joined to many
        is_read = tl.where(is_taken, at < length, False)
        x = tl.load(logits_ptr + first + at, mask=is_read, other=-float("inf"), eviction_policy="evict_first")
        dx = logit_rows.exp(x.to(tl.float32) - top - log_sum) * of_probability - of_every
        tl.store(logits_ptr + first + at, dx.to(logits_ptr.dtype.element_ty), mask=at < length)
    if ENDS:
        column, inside = logit_rows.ends(base, first, length, num_classes, VECTOR)
        is_read = tl.where(is_taken, inside, False)
        x_end = tl.load(logits_ptr + base + column, mask=is_read, other=-float("inf")).to(tl.float32)
        dx_end = logit_rows.exp(x_end - top - log_sum) * of_probability - of_every
        tl.store(logits_ptr + base + column, dx_end.to(logits_ptr.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # the target's column is overwritten once more, after the thread that has it
    of_target = logit_rows.exp(at_target - top - log_sum) * of_probability - of_every - dloss * (1 - smoothing)
    tl.store(logits_ptr + base + target, of_target.to(logits_ptr.dtype.element_ty), mask=is_inside & is_taken)


def launch(
    logits: Tensor, targets: Tensor, loss: Tensor, label_smoothing: float, z_loss: float, ignore_index: int
) -> None:
    """Write loss (N,) in float32, and over logits (N, V), with contiguous rows of any stride, their gradient."""
    if not targets.numel():
        return
    block = min(max(next_power_of_2(logits.shape[1]), 512), LAUNCH["BLOCK"])
    with on(logits):
        _kernel[(targets.numel(),)](
            logits, targets, loss, logits.stride(0), logits.shape[1], label_smoothing, z_loss, ignore_index,
            SMOOTHED=label_smoothing > 0, **logit_rows.vectors(logits), BLOCK=block,
            num_warps=block // (32 * LAUNCH["per_thread"]),
        )
