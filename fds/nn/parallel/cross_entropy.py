"""Cross-entropy over a vocabulary whose columns lie on the ranks of a tensor axis: of logits, and of a linear head.

The equations are those of `fds.kernels.vocabulary_parts`, with a rank for each part. Ranks gather their messages
(3, N), or (4, N) with label smoothing, in float32 (float64 for float64), and each finds the loss of all tokens in them.
All compute one loss and have the gradient of their own columns, with no further message; logits are never gathered.

Sends: 12 or 16 bytes for each token to each other rank, in one all_gather, where a maximum and a sum by all_reduce
would be two that wait for each other; 8 bytes more in another, before, if the number of classes is not given.
Holds: forward a block of rows in float32 (4 MB on a CPU); backward the gradient, in the dtype of logits.
Saves: logits, and for each token a column, m and l (16 bytes); no softmax.

Of a head, chunks of tokens are those of `fds.kernels.linear_cross_entropy`: a rank computes its logits of a chunk
(C, V_r), gathers messages about them, overwrites them with their gradient, and multiplies that. The gradient of hidden
is the sum of the ranks' products, so it is summed once, at the end of the forward pass.

Sends: the same for each chunk; and the gradient of hidden in one all_reduce. With `sequence_dim` an all_gather of
hidden before, and a reduce_scatter in place of the all_reduce.
Holds: as on one rank with V_r classes, and with `sequence_dim` hidden and its gradient whole during the forward pass.
Saves: the gradients of hidden (this rank's part of it), weight and bias.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.collectives import Axis, operators
from fds.collectives.axis import of_handle
from fds.collectives.functional import apply_function
from fds.errors import KernelError, is_int
from fds.kernels import arguments, head_loss as one_rank, vocabulary_parts as parts
from fds.kernels.head_loss import LinearCrossEntropy
from fds.kernels.operators import Function, first_order, operator
from fds.kernels.token_loss import check_options, check_targets, counted, cross_entropy, reduced
from fds.loss import current_mode
from fds.nn.parallel import checking
from fds.nn.parallel.region import ranges


def vocab_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    axis: Axis,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_classes: int | None = None,
) -> Tensor:
    """Return the cross-entropy of targets under the softmax of the logits of all ranks, float32 (float64 for float64).

    Every rank of the axis has a part of the columns, in the order of the ranks, and calls this with the same targets
    and options. All get the same loss, that of `fds.kernels.cross_entropy` for the logits side by side, and each the
    gradient of its own logits, if all take the gradient of this one loss. On an axis of one rank it is that function.
    A target outside [0, V) that is not ignored makes its loss and the gradient of its row NaN. There is no second
    derivative.

    Args:
        logits: (..., V_r) float32, float16, bfloat16 or float64: this rank's columns of V. There may be none.
        targets: (...) int64, of the whole vocabulary.
        axis: the ranks among which the vocabulary is divided.
        label_smoothing: in [0, 1], the probability that is spread over all classes.
        z_loss: adds z_loss * logsumexp(logits)^2 to the loss of each token.
        ignore_index: tokens with this target have loss 0 and are not counted by the mean.
        reduction: "mean" over tokens that are not ignored, "sum" (what `fds.Mean` takes as total), or "none": (...).
        num_classes: V. Ranks have columns as by torch.tensor_split, or equal numbers of at least V together, where
            columns from V on are padding: they do not count, and their gradient is 0. Padded rows that
            `tensor_parallel` divides into unequal numbers are refused. By default all columns count,
            however many each rank has, and ranks tell each other how many in a message more.

    Raises `KernelError` for any other dtype, shape or device, or a bad option.
    """
    checking.axis("vocab_cross_entropy", axis, KernelError)
    arguments.required(logits=logits)
    arguments.floating(logits=logits)
    if logits.dim() < 1:
        raise KernelError("logits have no classes", where="logits", got="()", want="(..., V_r)")
    check_targets(targets, logits, "logits")
    check_options(label_smoothing, z_loss, ignore_index, reduction, ("mean", "sum", "none"))
    check_num_classes(num_classes)
    columns = columns_of(axis, logits.shape[-1], num_classes, targets.device)
    if axis.size == 1:
        return cross_entropy(
            columns.without_padding(logits, -1),
            targets,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            ignore_index=ignore_index,
            reduction=reduction,
        )
    t = targets.reshape(-1)
    loss, _ = apply_function(
        _VocabCrossEntropy,
        logits.reshape(t.numel(), logits.shape[-1]),
        columns.of(t, ignore_index),
        axis,
        columns.length,
        float(label_smoothing),
        label_smoothing / columns.total,
        float(z_loss),
    )
    return reduced(
        counted(loss, t, columns.total, ignore_index).reshape(targets.shape), targets, ignore_index, reduction
    )


class Columns(NamedTuple):  # which dynamo can make, unlike a frozen class of attrs
    """Where a rank's columns lie in the vocabulary: numbers, or () tensors on the device if ranks have told them."""

    first: int | Tensor
    length: int  # of those that are no padding
    total: int | Tensor  # of the vocabulary, without padding

    def without_padding(self, x: Tensor, dim: int) -> Tensor:
        """Return `x` without padding along `dim`."""
        return x if x.shape[dim] == self.length else x.narrow(dim, 0, self.length)

    def of(self, targets: Tensor, ignore_index: int) -> Tensor:
        """Return each target's column on this rank, or that it is ignored or elsewhere, (N,)."""
        columns = targets - self.first
        columns = columns.where((columns >= 0) & (columns < self.length), parts.ELSEWHERE)
        return columns.masked_fill_(targets == ignore_index, parts.IGNORED)


def columns_of(axis: Axis, count: int, num_classes: int | None, device: torch.device) -> Columns:
    """Return where the `held` columns of this rank lie in the vocabulary. Raises `KernelError` where they cannot."""
    if num_classes is None and axis.size > 1:
        counts = operators.gather(torch.full((1,), count, device=device), axis.handle, 0)
        return Columns(counts[: axis.index].sum(), count, counts.sum().double())  # float64, as quotients with it are
    total = count if num_classes is None else num_classes
    if total < 1:
        raise KernelError("there are no classes", where="num_classes", got=str(total), want="a column or more")
    _check_padded_rows(axis, count, total)
    each, more = divmod(total, axis.size)
    if count == each + (axis.index < more):
        return Columns(axis.index * each + min(axis.index, more), count, total)
    if count * axis.size < total:
        raise KernelError(
            "this rank has too few columns of the vocabulary",
            where=f"rank {axis.index} of axis {axis.name!r}",
            got=str(count),
            want=f"{each + (axis.index < more)} of {total}, or equal parts of at least so many",
        )
    return Columns(axis.index * count, min(max(total - axis.index * count, 0), count), total)


def _check_padded_rows(axis: Axis, count: int, total: int) -> None:
    """Raise `KernelError` for columns of a head that tensor_parallel divides into unequal numbers, padding included.

    Of those this rank's columns do not show where they begin.
    """
    if torch.compiler.is_compiling():  # dynamo reads no ContextVar; what it compiles has run here before
        return
    vocabularies = [n for change in current_mode().modules for n in getattr(change, "vocabularies", ())]
    fitting = [n for n in vocabularies if n >= total and ranges(n, axis)[axis.index][1] == count]
    if fitting and all(n % axis.size and n > total for n in fitting):
        raise KernelError(
            "the ranks do not divide the padded rows of a vocabulary",
            where=f"num_classes, over axis {axis.name!r}, {axis.size} ranks",
            got=f"{fitting[0]} rows, of which {total} are classes",
            want=f"as many rows as classes, or a multiple of {axis.size}",
        )


def check_num_classes(num_classes: int | None) -> None:
    """Raise `KernelError` for what is neither None nor a number of classes."""
    if num_classes is not None and not is_int(num_classes, 1):
        raise KernelError(
            "num_classes is not a number of classes",
            where="num_classes",
            got=repr(num_classes)[:80],
            want="an int from 1 on",
        )


class _VocabCrossEntropy(Function):
    takes, gives = "pieces", "whole"  # see `uses`
    advice = "fds.nn.vocab(gather=False) for the head, or torch's cross_entropy of logits that all ranks have whole"

    @staticmethod
    def forward(
        logits: Tensor, columns: Tensor, axis: Axis, count: int, label_smoothing: float, each: Any, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        message = parts.statistics(logits[:, :count], columns, label_smoothing > 0)
        return parts.combined(_gather_messages(message, axis), label_smoothing, each, z_loss)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, columns, _, ctx.count, *ctx.options = inputs
        ctx.save_for_backward(logits, columns, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, _: Any) -> tuple:
        if dloss is None:
            return (None,) * 7
        logits, columns, norms = ctx.saved_tensors
        factors = parts.factors(dloss, norms, *ctx.options)
        return first_order(parts.gradient, logits, columns, norms, factors, ctx.options[0] > 0, ctx.count), *[None] * 6


def _gather_messages(message: Tensor, axis: Axis) -> Tensor:
    """Return the messages of all ranks (ranks, 3 or 4, N), given this one's."""
    return operators.gather(message, axis.handle, 0).unflatten(0, (axis.size, len(message)))


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
        columns = columns_of(axis, weight.shape[0], num_classes, targets.device)
        weight, bias = columns.without_padding(weight, 0), None if bias is None else columns.without_padding(bias, 0)
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
    columns = columns_of(along, weight.shape[0], num_classes, targets.device)
    write = functools.partial(
        _write,
        axis=along,
        vocabulary=columns,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        ignore_index=ignore_index,
    )
    whole = hidden if sequence_dim is None else operators.gather(hidden, axis, sequence_dim % hidden.dim())
    with torch.autocast(hidden.device.type, enabled=False):  # as on one rank
        total, dhidden, dweight, dbias = one_rank.total_and_gradients(
            whole.reshape(targets.numel(), whole.shape[-1]),
            columns.without_padding(weight, 0),
            targets.reshape(-1),
            None if bias is None else columns.without_padding(bias, 0),
            wants,
            chunk_tokens,
            write,
        )
    padding = weight.shape[0] - columns.length
    if wants[0]:
        dhidden = dhidden.view(whole.shape)
        if sequence_dim is None:
            along.start_all_reduce(dhidden).wait()
        else:
            dhidden = operators.scatter_sum(dhidden, axis, sequence_dim % hidden.dim())
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
    vocabulary: Columns,
    label_smoothing: float,
    z_loss: float,
    ignore_index: int,
) -> None:
    """Write the losses of a chunk, and overwrite this rank's logits with their gradient if `wants`."""
    columns = vocabulary.of(targets, ignore_index)
    factors = label_smoothing, label_smoothing / vocabulary.total, z_loss
    smoothed = label_smoothing > 0
    loss, norms = parts.combined(_gather_messages(parts.statistics(logits, columns, smoothed), axis), *factors)
    losses.copy_(counted(loss, targets, vocabulary.total, ignore_index))
    if wants:
        dloss = counted(torch.ones_like(loss), targets, vocabulary.total, ignore_index)
        parts.write_gradient(logits, columns, norms, parts.factors(dloss, norms, *factors), smoothed, logits)
