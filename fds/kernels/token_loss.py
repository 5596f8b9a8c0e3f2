"""Cross-entropy of tokens over a vocabulary, with label smoothing and z-loss; logits are read once in each pass.

For the row x (V,) of one token with target t, smoothing e, and z::

    lse = m + l        m = max_j(x_j)        l = log(sum_j(exp(x_j - m)))
    loss = l + (1 - e) * (m - x_t) + (e / V) * sum_j(m - x_j) + z * lse^2
    dx_j = dloss * (exp(x_j - m - l) * (1 + 2 * z * lse) - (1 - e) * [j = t] - e / V)

An ignored token has loss 0 and gradient 0, whatever its logits. A target outside [0, V) that is not ignored makes its
loss and its gradient NaN, because raising an error would mean waiting for the device.
m and l are stored separately: their sum is rounded relative to its size, so that with logits of 1000 every probability
would be wrong in its fifth digit. Logits (N, V); targets (N,) int64; loss (N,) and (m, l) (N, 2) float32.

Moves: forward reads logits, backward reads logits and writes their gradient. Saves: logits, targets, m and l.
Sources:
1. Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3: maximum and sum in one pass.
2. Szegedy et al. 2015, arXiv:1512.00567, section 7: label smoothing, as torch.nn.functional.cross_entropy has it.
3. Chowdhery et al. 2022, arXiv:2204.02311, section 5: z-loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fds.errors import KernelError, is_int, is_number
from fds.kernels import arguments, logit_rows
from fds.kernels.choice import runs_triton
from fds.kernels.language import cdiv, jit, next_power_of_2, on, tl
from fds.kernels.operators import Function, first_order, operator

REDUCTIONS = ("mean", "sum", "none")


def reference(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0, ignore_index: int = -100
) -> Tensor:
    """Return the loss of each token in plain torch, (N,) float32 (float64 for float64)."""
    wide = arguments.width(logits)
    log_probs = logits.log_softmax(-1, dtype=wide)  # on a GPU it reads 16 bits, with no copy of the logits in float32
    lse = logits.to(wide).logsumexp(-1) if z_loss else None
    return losses_of(log_probs, lse, targets, label_smoothing, z_loss, ignore_index)


def losses_of(
    log_probs: Tensor, lse: Tensor | None, targets: Tensor, label_smoothing: float, z_loss: float, ignore_index: int
) -> Tensor:
    """Return the loss of each token (N,) of its logarithms of probabilities (N, V) and, with z_loss, lse (N,)."""
    num_classes = log_probs.shape[-1]
    is_inside = (targets >= 0) & (targets < num_classes)
    loss = (label_smoothing - 1) * log_probs.gather(-1, targets.where(is_inside, 0)[:, None])[:, 0]
    if label_smoothing:
        loss = loss - label_smoothing / num_classes * log_probs.sum(-1)
    if lse is not None:
        loss = loss + z_loss * lse.square()
    return counted(loss, targets, num_classes, ignore_index)


def counted(loss: Tensor, targets: Tensor, num_classes: int | Tensor, ignore_index: int) -> Tensor:
    """Return the losses (N,), 0 for ignored targets and NaN for targets that are no class."""
    is_ignored, is_inside = targets == ignore_index, (targets >= 0) & (targets < num_classes)
    # a factor, so that the gradient is NaN too
    poison = torch.ones_like(loss).masked_fill(~is_inside & ~is_ignored, float("nan"))
    return (loss * poison).masked_fill(is_ignored, 0.0)


def reduced(loss: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Return losses (N,) in the shape of targets, their sum, or their mean over tokens that are not ignored."""
    if reduction == "none":
        return loss.reshape(targets.shape)
    return loss.sum() if reduction == "sum" else loss.sum() / num_tokens(targets, ignore_index)


# Sixteen elements per thread, eight warps: two loads of 16 bytes in flight in 16 bits, four in float32. A maximum and a
# sum per vector, not per element, leave 30 registers: a multiprocessor holds eight programs, with 64 KB in flight.
# Smaller vocabularies take fewer warps. Derived, not measured.
LAUNCH = {"BLOCK": 4096, "per_thread": 16}


def _launch(num_classes: int) -> dict[str, int]:
    block = min(max(next_power_of_2(num_classes), 512), LAUNCH["BLOCK"])
    return {"BLOCK": block, "num_warps": block // (32 * LAUNCH["per_thread"])}


@jit
def _forward_kernel(
    logits_ptr, targets_ptr, loss_ptr, norms_ptr, row_stride, num_classes, smoothing, z_loss, ignore_index,
    SMOOTHED: tl.constexpr, VECTOR: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    loss, top, log_sum, _ = logit_rows.row_loss(
        logits_ptr, row * row_stride, target, target != ignore_index, num_classes, smoothing, z_loss, SMOOTHED, VECTOR,
        ENDS, BLOCK,
    )
    tl.store(loss_ptr + row, loss)
    tl.store(norms_ptr + 2 * row, top)
    tl.store(norms_ptr + 2 * row + 1, log_sum)


@jit
def _gradient(x, column, target, top, log_sum, of_probability, of_target, of_every):
    dx = logit_rows.exp(x.to(tl.float32) - top - log_sum) * of_probability - of_every
    return tl.where(column == target, dx - of_target, dx)


@jit
def _backward_kernel(
    dloss_ptr, logits_ptr, targets_ptr, norms_ptr, dlogits_ptr, dloss_stride, row_stride, num_classes, tiles, smoothing,
    z_loss, ignore_index, VECTOR: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    target = tl.load(targets_ptr + row)
    is_taken = target != ignore_index
    is_inside = (target >= 0) & (target < num_classes)
    top, log_sum = tl.load(norms_ptr + 2 * row), tl.load(norms_ptr + 2 * row + 1)
    dloss = tl.load(dloss_ptr + row * dloss_stride)
    dloss = tl.where(is_taken, tl.where(is_inside, dloss, float("nan")), 0.0)
    of_probability = dloss * (1 + 2 * z_loss * (top + log_sum))
    of_target, of_every = dloss * (1 - smoothing), dloss * (smoothing / num_classes)
    base = row * row_stride
    first, length = logit_rows.middle(base, num_classes, VECTOR)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    x = tl.load(logits_ptr + first + at, mask=tl.where(is_taken, inside, False), other=-float("inf"))
    # the target's column relative to the aligned part, as `at` is
    dx = _gradient(x, at, target - (first - base), top, log_sum, of_probability, of_target, of_every)
    tl.store(dlogits_ptr + first + at, dx.to(dlogits_ptr.dtype.element_ty), mask=inside)
    if ENDS:  # noqa: SIM102  (a compile-time condition)
        if tile == 0:
            column, is_end = logit_rows.ends(base, first, length, num_classes, VECTOR)
            x_end = tl.load(logits_ptr + base + column, mask=tl.where(is_taken, is_end, False), other=-float("inf"))
            dx_end = _gradient(x_end, column, target, top, log_sum, of_probability, of_target, of_every)
            tl.store(dlogits_ptr + base + column, dx_end.to(dlogits_ptr.dtype.element_ty), mask=is_end)


def launch_forward(
    logits: Tensor, targets: Tensor, loss: Tensor, norms: Tensor, label_smoothing: float, z_loss: float,
    ignore_index: int,
) -> None:
    """Write loss (N,) and norms (N, 2), m and l, in float32, of logits (N, V) with contiguous rows of any stride."""
    if not targets.numel():
        return
    with on(logits):
        _forward_kernel[(targets.numel(),)](
            logits, targets, loss, norms, logits.stride(0), logits.shape[1], label_smoothing, z_loss, ignore_index,
            SMOOTHED=label_smoothing > 0, **logit_rows.vectors(logits), **_launch(logits.shape[1]),
        )


def launch_backward(
    dloss: Tensor, logits: Tensor, targets: Tensor, norms: Tensor, dlogits: Tensor, label_smoothing: float,
    z_loss: float, ignore_index: int,
) -> None:
    """Write the gradient with respect to logits, in their layout or over them; dloss is (N,) float32."""
    if not targets.numel():
        return
    meta = _launch(logits.shape[1])
    tiles = cdiv(logits.shape[1], meta["BLOCK"])
    with on(logits):
        _backward_kernel[(targets.numel() * tiles,)](
            dloss, logits, targets, norms, dlogits, dloss.stride(0), logits.stride(0), logits.shape[1], tiles,
            label_smoothing, z_loss, ignore_index, **logit_rows.vectors(logits), **meta,
        )


def _rows(logits: Tensor) -> Tensor:
    """Return logits with contiguous rows, at most their own length apart."""
    n, v = logits.shape
    return logits if logits.stride(1) == 1 and n > 1 and v <= logits.stride(0) <= 2 * v else logits.contiguous()


def _like(rows: Tensor) -> Tensor:
    return torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device=rows.device)


def _outputs(targets: Tensor) -> tuple[Tensor, Tensor]:
    loss = targets.new_empty(targets.shape, dtype=torch.float32)
    return loss, loss.new_empty(*targets.shape, 2)


@operator("cross_entropy", lambda logits, targets, *_: _outputs(targets))
def _forward(
    logits: Tensor, targets: Tensor, label_smoothing: float, z_loss: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    loss, norms = _outputs(targets)
    launch_forward(_rows(logits), targets.contiguous(), loss, norms, label_smoothing, z_loss, ignore_index)
    return loss, norms


@operator("cross_entropy_backward", lambda dloss, logits, *_: _like(_rows(logits)))
def _backward(
    dloss: Tensor, logits: Tensor, targets: Tensor, norms: Tensor, label_smoothing: float, z_loss: float,
    ignore_index: int,
) -> Tensor:
    rows = _rows(logits)
    dlogits = _like(rows)
    launch_backward(dloss, rows, targets.contiguous(), norms, dlogits, label_smoothing, z_loss, ignore_index)
    return dlogits


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        logits: Tensor, targets: Tensor, label_smoothing: float, z_loss: float, ignore_index: int
    ) -> tuple[Tensor, Tensor]:
        return _forward(logits, targets, label_smoothing, z_loss, ignore_index)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, targets, *ctx.options = inputs
        ctx.save_for_backward(logits, targets, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, _: Any) -> tuple:
        if dloss is None:
            return (None,) * 5
        return first_order(_backward, dloss, *ctx.saved_tensors, *ctx.options), *[None] * 4


def cross_entropy(
    logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0, ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross-entropy of targets under softmax(logits), in float32 (float64 for float64).

    With z_loss 0 it is torch.nn.functional.cross_entropy, but the result is not rounded to 16 bits, and the mean over
    no tokens is 0 instead of NaN, as a microbatch may hold padding alone.
    A target outside [0, V) that is not ignored makes its loss and the gradient of its row NaN.

    Args:
        logits: (..., V) float32, float16 or bfloat16 (float64 by the reference).
        targets: (...) int64.
        label_smoothing: in [0, 1], the probability that is spread over all classes.
        z_loss: adds z_loss * logsumexp(logits)^2 to the loss of each token.
        ignore_index: tokens with this target have loss 0 and are not counted by the mean.
        reduction: "mean" over tokens that are not ignored, "sum" (what `fds.Mean` takes as total), or "none": (...).

    Raises `KernelError` for any other dtype, shape or device, or a bad option.
    """
    arguments.floating(logits=logits)
    if logits.dim() < 1 or not logits.shape[-1]:
        raise KernelError("logits have no classes", where="logits", got=str(tuple(logits.shape)), want="(..., V)")
    check_targets(targets, logits, "logits")
    check_options(label_smoothing, z_loss, ignore_index, reduction, REDUCTIONS)
    x, t = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    options = (float(label_smoothing), float(z_loss), ignore_index)
    if runs_triton("cross_entropy", logits):
        loss, _ = _CrossEntropy.apply(x, t, *options)
    else:
        loss = reference(x, t, label_smoothing=options[0], z_loss=options[1], ignore_index=ignore_index)
    return reduced(loss, targets, ignore_index, reduction)


def num_tokens(targets: Tensor, ignore_index: int) -> Tensor:
    """Return the divisor of a mean, () int64: the number of targets that are not ignored, at least 1."""
    return (targets != ignore_index).sum().clamp(min=1)


def check_targets(targets: Tensor, of: Tensor, name: str) -> None:
    """Raise `KernelError` unless targets are int64, one for each row of the tensor `name`, on its device."""
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64:
        got = str(targets.dtype) if isinstance(targets, Tensor) else type(targets).__name__
        raise KernelError("targets are not a tensor of class indices", where="targets", got=got, want="int64")
    if targets.shape != of.shape[:-1]:
        raise KernelError(f"targets are not one for each row of {name}", where="targets", got=str(tuple(targets.shape)),
                          want=str(tuple(of.shape[:-1])))
    if targets.device != of.device:
        raise KernelError(f"targets are on another device than {name}", where="targets", got=str(targets.device),
                          want=str(of.device), hint=f"targets.to({name}.device)")


def check_options(
    label_smoothing: float, z_loss: float, ignore_index: int, reduction: str, reductions: tuple[str, ...]
) -> None:
    """Raise `KernelError` for options out of range."""
    if not is_number(label_smoothing) or not 0 <= label_smoothing <= 1:
        raise KernelError("label_smoothing is out of range", where="label_smoothing", got=repr(label_smoothing),
                          want="a number in [0, 1]")
    if not is_number(z_loss) or not 0 <= z_loss < float("inf"):
        raise KernelError("z_loss is not a factor", where="z_loss", got=repr(z_loss), want="a number from 0 on")
    if not is_int(ignore_index):
        raise KernelError("ignore_index is not a class", where="ignore_index", got=repr(ignore_index), want="an int")
    if reduction not in reductions:
        raise KernelError("there is no such reduction", where="reduction", got=repr(reduction),
                          want=" or ".join(map(repr, reductions)))
