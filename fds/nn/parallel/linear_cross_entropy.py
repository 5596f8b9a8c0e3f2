"""Cross-entropy of a linear head whose rows lie on the ranks of a tensor axis; logits are not all held, and not sent.

Chunks of tokens are those of `fds.kernels.linear_cross_entropy`: a rank computes its logits of a chunk (C, V_r),
gathers messages about them (see `vocab_cross_entropy`), overwrites them with their gradient, and multiplies that. The
gradient of hidden is the sum of the ranks' products, so it is summed once, at the end of the forward pass.

Sends: for each chunk 12 or 16 bytes a token to each other rank, in one all_gather; and the gradient of hidden in one
all_reduce. With `sequence_dim` an all_gather of hidden before, and a reduce_scatter in place of the all_reduce.
Holds: as on one rank with V_r classes, and with `sequence_dim` hidden and its gradient whole during the forward pass.
Saves: the gradients of hidden (this rank's part of it), weight and bias.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.collectives import Axis, operators
from fds.collectives.axis import of_handle
from fds.errors import KernelError, is_int
from fds.kernels import arguments, head_loss as one_rank, vocabulary_parts as parts
from fds.kernels.head_loss import LinearCrossEntropy
from fds.kernels.operators import operator
from fds.kernels.token_loss import counted, reduced
from fds.nn.parallel import checking
from fds.nn.parallel.vocab_cross_entropy import Columns, check_num_classes, columns_of, gathered


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    axis: Axis,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_classes: int | None = None,
    sequence_dim: int | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Return vocab_cross_entropy(linear(hidden, weight, bias), targets, axis) without holding the logits of all tokens.

    Every rank of the axis has a part of the rows of weight, in the order of the ranks, and calls this with the same
    targets and options. All get the same loss, that of `fds.kernels.linear_cross_entropy` for the rows of all; if all
    take the gradient of this one loss, each gets that of its rows, and the whole one of hidden. On an axis of one rank
    it is that function. Gradients are computed in the forward pass, for arguments that require them, the same ones on
    all ranks: evaluate under torch.no_grad, and do not wrap the head in an activation checkpoint. Under autocast
    hidden, weight and bias are cast as by torch.nn.functional.linear. The loss is float32, or float64 for float64.

    Args:
        hidden: (..., H) float32, float16, bfloat16 or float64, the same on all ranks.
        weight: (V_r, H) in the dtype of hidden: this rank's rows of V. There may be none.
        targets: (...) int64, of the whole vocabulary and the whole sequence.
        bias: (V_r,) in the dtype of hidden.
        axis: the ranks among which the vocabulary is divided.
        label_smoothing: as in `vocab_cross_entropy`, like z_loss and ignore_index.
        z_loss: the factor of logsumexp(logits)^2.
        ignore_index: the target of tokens that are not counted.
        reduction: "mean" over the tokens that are not ignored, or "sum" (what `fds.Mean` takes as total).
        num_classes: V, and how the rows are divided, as in `vocab_cross_entropy`.
        sequence_dim: the dim of hidden along which this rank has one of `axis.size` equal pieces, if it has; the ranks
            gather them, and the gradient is that of the piece.
        chunk_tokens: tokens per chunk; by default chosen from the number of tokens.

    Raises `KernelError` for any other dtype, shape or device, or a bad option.
    """
    checking.axis("linear_cross_entropy", axis, KernelError)
    arguments.required(hidden=hidden, weight=weight)
    arguments.floating(hidden=hidden)
    check_num_classes(num_classes)
    whole = hidden if sequence_dim is None else _whole(hidden, axis, sequence_dim)
    options = label_smoothing, z_loss, ignore_index
    one_rank.check(whole, weight, targets, bias, *options, reduction, chunk_tokens)
    if axis.size == 1:
        own = columns_of(axis, weight.shape[0], num_classes, targets.device)
        weight, bias = own.counted(weight, 0), None if bias is None else own.counted(bias, 0)
        return one_rank.linear_cross_entropy(
            hidden,
            weight,
            targets,
            bias,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            ignore_index=ignore_index,
            reduction=reduction,
            chunk_tokens=chunk_tokens,
        )
    hidden, weight, bias, wants = one_rank.cast_and_wanted(hidden, weight, bias)
    total, *_ = _VocabLinearCrossEntropy.apply(
        hidden,
        weight,
        targets,
        bias,
        wants,
        chunk_tokens or one_rank.chunk_size(targets.numel()),
        axis.handle,
        num_classes,
        sequence_dim,
        float(label_smoothing),
        float(z_loss),
        ignore_index,
    )
    return reduced(total, targets, ignore_index, reduction)


def _whole(hidden: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return something of the shape that the ranks' pieces of hidden have together, which holds no memory."""
    if not is_int(dim) or not -hidden.dim() <= dim < hidden.dim() or dim % hidden.dim() == hidden.dim() - 1:
        raise KernelError(
            "hidden has no such dim of tokens",
            where="sequence_dim",
            got=repr(dim),
            want=f"a dim of {tuple(hidden.shape)} but the last",
        )
    shape = [n * axis.size if i == dim % hidden.dim() else n for i, n in enumerate(hidden.shape)]
    return hidden.new_empty(()).expand(shape)


@operator(
    "vocab_linear_cross_entropy",
    lambda hidden, weight, targets, bias, wants, *_: one_rank.outputs(hidden, weight, wants),
)
def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    wants: list[bool],
    chunk_tokens: int,
    axis: int,
    num_classes: int | None,
    sequence_dim: int | None,
    label_smoothing: float,
    z_loss: float,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    along = of_handle(axis)
    own = columns_of(along, weight.shape[0], num_classes, targets.device)
    write = functools.partial(
        _write, axis=along, own=own, label_smoothing=label_smoothing, z_loss=z_loss, ignore_index=ignore_index
    )
    whole = hidden if sequence_dim is None else operators.all_gather(hidden, axis, sequence_dim % hidden.dim())
    with torch.autocast(hidden.device.type, enabled=False):  # as on one rank
        total, dhidden, dweight, dbias = one_rank.total_and_gradients(
            whole.reshape(targets.numel(), whole.shape[-1]),
            own.counted(weight, 0),
            targets.reshape(-1),
            None if bias is None else own.counted(bias, 0),
            wants,
            chunk_tokens,
            write,
        )
    padding = weight.shape[0] - own.length
    if wants[0]:
        dhidden = dhidden.view(whole.shape)
        if sequence_dim is None:
            along.start_all_reduce(dhidden).wait()
        else:
            dhidden = operators.reduce_scatter(dhidden, axis, sequence_dim % hidden.dim())
    if wants[1] and padding:
        dweight = F.pad(dweight, (0, 0, 0, padding))
    if wants[2] and padding:
        dbias = F.pad(dbias, (0, padding))
    return total, dhidden, dweight, dbias


class _VocabLinearCrossEntropy(LinearCrossEntropy):
    gives = "whole"  # see `uses`
    advice = "'vocab' for the head whose weight this is"

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        LinearCrossEntropy.setup_context(ctx, inputs, output)
        ctx.takes = "whole" if inputs[8] is None else "pieces"  # parts of sequences have terms of gradients, too

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return _forward(*args)


def _write(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    wants: bool,
    *,
    axis: Axis,
    own: Columns,
    label_smoothing: float,
    z_loss: float,
    ignore_index: int,
) -> None:
    """Write the losses of a chunk, and overwrite this rank's logits with their gradient if `wants`."""
    columns, factors = own.of(targets, ignore_index), (label_smoothing, label_smoothing / own.total, z_loss)
    smoothed = label_smoothing > 0
    loss, norms = parts.combined(gathered(parts.statistics(logits, columns, smoothed), axis), *factors)
    losses.copy_(counted(loss, targets, own.total, ignore_index))
    if wants:
        dloss = counted(torch.ones_like(loss), targets, own.total, ignore_index)
        parts.write_gradient(logits, columns, norms, parts.factors(dloss, norms, *factors), smoothed, logits)
