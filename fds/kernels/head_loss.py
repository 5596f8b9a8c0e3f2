"""Cross-entropy of a linear head without all logits in memory: each chunk of them becomes its gradient at once.

    total = sum_i(loss(hidden_i @ weight.T + bias, target_i))        the loss as in fds.kernels.token_loss

Hidden (N, H), weight (V, H), targets (N,). For a chunk of C tokens the forward pass computes the logits (C, V),
overwrites them with their gradient, and multiplies that with hidden and weight::

    dhidden_c = dlogits_c @ weight        dweight += dlogits_c.T @ hidden_c        dbias += sum_i(dlogits_ci)

so backward only scales by the gradient of the total, which it reads on the device.
Holds: C * V logits and, if required, dhidden in its dtype and dweight in float32 (4 * V * H bytes); backward writes
both in their dtypes. Plain torch holds N * V two or three times. Moves, of N * V elements of logits: one product writes
them, fds.kernels.logit_rows reads and writes them, two products read them; and dweight twice per chunk,
inside of its product. Saves: dhidden and dweight; neither hidden nor weight.
Sources:
1. Hsu et al. 2024, arXiv:2410.10989, section 3.2: the chunks, with gradients computed in the forward pass.
2. Wijmans et al. 2024, arXiv:2411.09009: the same loss, and the memory that it takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.errors import KernelError, is_int
from fds.kernels import arguments, logit_rows, token_loss
from fds.kernels.choice import runs_triton
from fds.kernels.language import cdiv
from fds.kernels.operators import Function, first_order, operator
from fds.kernels.token_loss import check_options, check_targets, launch_forward, num_tokens

# Rows of a chunk start at multiples of 64 elements, 128 bytes in 16 bits: the fast kernels of torch.mm, and loads of 16
# bytes, need rows aligned to 16 bytes, which rows of 50257 elements are not.
ROW = 64
SLICE_BYTES = 2**25  # of a product in float32 where it cannot be added to dweight at once: so much more is held

_LEVELS: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]  (what torch.func wraps tensors with)


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, label_smoothing: float = 0.0,
    z_loss: float = 0.0, ignore_index: int = -100,
) -> Tensor:
    """Return the loss of each token in plain torch, (N,), from all logits at once, with gradients of any order."""
    logits = F.linear(hidden, weight, bias)
    return token_loss.reference(
        logits, targets, label_smoothing=label_smoothing, z_loss=z_loss, ignore_index=ignore_index
    )


def chunk_size(num_tokens: int) -> int:
    """Return the tokens per chunk: a quarter of all, but 1024 to 4096 and at most half, in chunks of about equal size.

    A chunk reads and writes dweight (8 * V * H bytes) beside 6 * C * V * H operations: on an H200 (4.3 TB/s, 700 of its
    989 Tflop/s) that is 21% of the time of its products with 1024 tokens, 11% with 2048, 5% with 4096. Larger chunks
    gain little and cost memory, smaller ones are slow; a quarter of the logits is small beside the two or three times
    all of them that plain torch holds. Derived, not measured.
    """
    most = max(min(max(cdiv(num_tokens, 4), 1024), 4096, cdiv(num_tokens, 2)), 1)
    even = cdiv(num_tokens, max(cdiv(num_tokens, most), 1))
    return cdiv(even, 128) * 128 if even > 512 else max(even, 1)


def total_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, wants: list[bool], chunk_tokens: int,
    write: Callable[[Tensor, Tensor, Tensor, bool], None],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the summed loss and its gradients with respect to hidden, weight and bias, each empty unless in `wants`.

    The gradient of hidden has hidden's dtype; the loss and the other gradients are float32 (float64 for float64).
    `write(logits, targets, losses, wants)` writes the losses of a chunk and, if wanted, over logits their gradient.
    """
    n, v = hidden.shape[0], weight.shape[0]
    total, dhidden, dweight, dbias = outputs(hidden, weight, wants)
    dbias.zero_()
    if not n:
        dweight.zero_()
    memory = hidden.new_empty(min(chunk_tokens, n), cdiv(v, ROW) * ROW)
    losses = total.new_empty(n)
    for start in range(0, n, chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        h, t = hidden[rows], targets[rows]
        logits = memory[: h.shape[0], :v]
        if bias is None:
            torch.mm(h, weight.T, out=logits)
        else:
            torch.addmm(bias, h, weight.T, out=logits)
        write(logits, t, losses[rows], any(wants))
        if wants[0]:
            torch.mm(logits, weight, out=dhidden[rows])
        if wants[1]:
            _add_product(dweight, logits, h, beta=min(start, 1))
        if wants[2]:
            dbias += logits.sum(0, dtype=dbias.dtype)
    return losses.sum(), dhidden, dweight, dbias


def writer(label_smoothing: float, z_loss: float, ignore_index: int, by_kernels: bool) -> Callable[..., None]:
    """Return what writes the losses of a chunk."""
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss, "ignore_index": ignore_index}
    return functools.partial(_kernels if by_kernels else _torch, **options)


def _kernels(logits: Tensor, targets: Tensor, losses: Tensor, wants: bool, **options: Any) -> None:
    """Write the losses, and overwrite logits with their gradient if `wants`."""
    if wants:
        logit_rows.launch_with_gradient(logits, targets, losses, **options)
    else:
        launch_forward(logits, targets, losses, losses.new_empty(*losses.shape, 2), **options)


def _torch(
    logits: Tensor, targets: Tensor, losses: Tensor, wants: bool, label_smoothing: float, z_loss: float,
    ignore_index: int,
) -> None:
    """Do what `_kernels` does in plain torch, in one further tensor as large as the logits, of the loss's dtype."""
    v = logits.shape[1]
    log_probs = logits.log_softmax(1, dtype=losses.dtype)
    lse = logits.to(losses.dtype).logsumexp(1) if z_loss else None
    losses.copy_(token_loss.losses_of(log_probs, lse, targets, label_smoothing, z_loss, ignore_index))
    if wants:
        dx = log_probs.exp_()
        if lse is not None:
            dx *= (1 + 2 * z_loss * lse)[:, None]
        if label_smoothing:
            dx -= label_smoothing / v
        is_inside = ((targets >= 0) & (targets < v))[:, None]
        poison = torch.zeros_like(losses)[:, None].masked_fill_(~is_inside, float("nan"))
        dx.scatter_add_(1, targets[:, None].where(is_inside, 0), poison + (label_smoothing - 1))
        torch.add(dx, poison, out=logits).masked_fill_((targets == ignore_index)[:, None], 0.0)


def _add_product(total: Tensor, dlogits: Tensor, hidden: Tensor, beta: int) -> None:
    """Write dlogits.T @ hidden + beta * total to total, which is float32 for 16 bits: sums of chunks lose no digits."""
    if total.dtype == hidden.dtype:
        total.addmm_(dlogits.T, hidden, beta=beta)
    elif _products_are_wide(hidden.device):
        torch.addmm(total, dlogits.T, hidden, beta=beta, out_dtype=total.dtype, out=total)
    else:
        step = max(SLICE_BYTES // (4 * max(hidden.shape[1], 1)) // ROW * ROW, ROW)
        for part, of_part in zip(total.split(step), dlogits.T.split(step), strict=True):
            product = of_part.to(total.dtype) @ hidden.to(total.dtype)
            part.copy_(product) if beta == 0 else part.add_(product)


def _products_are_wide(device: torch.device) -> bool:
    """Return whether torch multiplies 16-bit numbers to float32 there: on CUDA, from compute capability 8.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def outputs(hidden: Tensor, weight: Tensor, wants: list[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return memory for the total and the gradients of hidden, weight and bias, of no elements unless wanted."""
    wide = arguments.width(hidden)
    new = lambda wanted, shape, dtype: hidden.new_empty(shape if wanted else (0,), dtype=dtype)
    return (
        hidden.new_empty((), dtype=wide), new(wants[0], hidden.shape, hidden.dtype),
        new(wants[1], weight.shape, wide), new(wants[2], weight.shape[:1], wide),
    )


@operator("linear_cross_entropy", lambda hidden, weight, targets, bias, wants, *_: outputs(hidden, weight, wants))
def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, wants: list[bool], chunk_tokens: int,
    label_smoothing: float, z_loss: float, ignore_index: int, by_kernels: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    write = writer(label_smoothing, z_loss, ignore_index, by_kernels)
    with torch.autocast(hidden.device.type, enabled=False):  # the arguments are cast already, and sums must not be
        return total_and_gradients(hidden, weight, targets.contiguous(), bias, wants, chunk_tokens, write)


@operator(
    "linear_cross_entropy_backward",
    lambda dtotal, dhidden, *others: tuple(torch.empty_like(x, dtype=dhidden.dtype) for x in (dhidden, *others)),
)
def _backward(dtotal: Tensor, dhidden: Tensor, dweight: Tensor, dbias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = dhidden.dtype  # of hidden, weight and bias; an empty gradient has it too
    return _scaled(dhidden, dtotal, dtype), _scaled(dweight, dtotal, dtype), _scaled(dbias, dtotal, dtype)


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x * factor, rounded once: torch would round a factor () to the dtype of x first."""
    return torch.mul(x, factor.reshape(1), out=torch.empty_like(x, dtype=dtype))


class LinearCrossEntropy(Function):
    """A total of `hidden, weight, targets, bias, wants, ...`, whose gradients `forward` returns beside it."""

    @staticmethod
    def forward(
        hidden: Any, weight: Any, targets: Any, bias: Any, wants: Any, chunk_tokens: Any, label_smoothing: Any,
        z_loss: Any, ignore_index: Any, by_kernels: Any,
    ) -> tuple[Tensor, ...]:
        return _forward(
            hidden, weight, targets, bias, wants, chunk_tokens, label_smoothing, z_loss, ignore_index, by_kernels
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.wants, ctx.num_options = inputs[4], len(inputs) - 4
        ctx.save_for_backward(*output[1:])  # not marked non-differentiable: see first_order
        ctx.set_materialize_grads(False)  # or zeros of their sizes would be made

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, *_: Any) -> tuple:
        if dtotal is None:
            return (None,) * (4 + ctx.num_options)
        gradients = first_order(_backward, dtotal, *ctx.saved_tensors)
        dhidden, dweight, dbias = (d if wanted else None for d, wanted in zip(gradients, ctx.wants, strict=True))
        return dhidden, dweight, None, dbias, *[None] * ctx.num_options


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, *, label_smoothing: float = 0.0,
    z_loss: float = 0.0, ignore_index: int = -100, reduction: str = "mean", chunk_tokens: int | None = None,
) -> Tensor:
    """Return cross_entropy(linear(hidden, weight, bias), targets) without the logits of all tokens in memory.

    Gradients are computed in the forward pass, for arguments that require them: evaluate under torch.no_grad, and do
    not wrap the head in an activation checkpoint, which would compute them twice. Under autocast hidden, weight and
    bias are cast as by torch.nn.functional.linear. The loss is float32, or float64 for float64.

    Args:
        hidden: (..., H) float32, float16, bfloat16 or float64.
        weight: (V, H) in the dtype of hidden; it may be used elsewhere too.
        targets: (...) int64.
        bias: (V,) in the dtype of hidden.
        label_smoothing: as in `cross_entropy`, like z_loss and ignore_index.
        z_loss: the factor of logsumexp(logits)^2.
        ignore_index: the target of tokens that are not counted.
        reduction: "mean" over the tokens that are not ignored, or "sum" (what `fds.Mean` takes as total).
        chunk_tokens: tokens per chunk; by default chosen from the number of tokens.

    Raises `KernelError` for any other dtype, shape or device, or a bad option.
    """
    check(hidden, weight, targets, bias, label_smoothing, z_loss, ignore_index, reduction, chunk_tokens)
    if not weight.shape[0]:
        raise KernelError("weight has no classes", where="weight", got=str(tuple(weight.shape)), want="(V, H)")
    hidden, weight, bias, wants = cast_and_wanted(hidden, weight, bias)
    x = hidden.reshape(targets.numel(), hidden.shape[-1])
    total, *_ = LinearCrossEntropy.apply(
        x, weight, targets.reshape(-1), bias, wants, chunk_tokens or chunk_size(targets.numel()),
        float(label_smoothing), float(z_loss), ignore_index, runs_triton("linear_cross_entropy", hidden),
    )
    return total if reduction == "sum" else total / num_tokens(targets, ignore_index)


def cast_and_wanted(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, list]:
    """Return hidden, weight and bias as autocast casts them, and of which of them a gradient is wanted."""
    tensors = arguments.as_products_cast(hidden, weight, bias)
    arguments.same_dtype(**dict(zip(("hidden", "weight", "bias"), tensors, strict=True)))
    return *tensors, [torch.is_grad_enabled() and _requires_grad(x) for x in tensors]


def _requires_grad(x: Tensor | None) -> bool:
    """Return whether x requires a gradient at any level of torch.func: each level wraps it, and only knows its own."""
    if x is None or x.requires_grad:
        return x is not None
    if torch.compiler.is_compiling():  # cannot unwrap: any level may require it
        return _LEVELS.peek_interpreter_stack() is not None
    wrapped = _LEVELS.is_functorch_wrapped_tensor(x)
    return wrapped and _requires_grad(_LEVELS.get_unwrapped(x))


def check(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, label_smoothing: float, z_loss: float,
    ignore_index: int, reduction: str, chunk_tokens: int | None,
) -> None:
    """Raise `KernelError` for arguments that do not fit each other, or options out of range."""
    arguments.floating(hidden=hidden, weight=weight, bias=bias)
    if hidden.dim() < 1:
        raise KernelError("hidden has no dims", where="hidden", got="()", want="(..., H)")
    arguments.shape((None, hidden.shape[-1]), weight=weight)
    arguments.shape((weight.shape[0],), bias=bias)
    check_targets(targets, hidden, "hidden")
    is_count = is_int(chunk_tokens, 1)
    if chunk_tokens is not None and not is_count:
        raise KernelError("chunk_tokens is not a number of tokens", where="chunk_tokens", got=repr(chunk_tokens),
                          want="an int from 1 on")
    if reduction == "none":
        raise KernelError(
            "there is no reduction 'none' here", where="reduction", got="'none'",
            want="'mean' or 'sum', since gradients are computed in the forward pass, before the tokens are weighted",
            hint="cross_entropy(F.linear(hidden, weight), targets, reduction='none') does, and holds all logits",
        )
    check_options(label_smoothing, z_loss, ignore_index, reduction, ("mean", "sum"))
