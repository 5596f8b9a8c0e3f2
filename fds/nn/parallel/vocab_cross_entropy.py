"""Cross-entropy over a vocabulary whose columns lie on the ranks of a tensor axis; logits are never gathered.

The equations are those of `fds.kernels.vocabulary_parts`, with a rank for each part. Ranks gather their messages
(3, N), or (4, N) with label smoothing, in float32 (float64 for float64), and each finds the loss of all tokens in them.
All compute one loss and have the gradient of their own columns, with no further message (see `mappings`).

Sends: 12 or 16 bytes for each token to each other rank, in one all_gather, where a maximum and a sum by all_reduce
would be two that wait for each other; 8 bytes more in another, before, if the number of classes is not given.
Holds: forward a block of rows in float32 (4 MB on a CPU); backward the gradient, in the dtype of logits.
Saves: logits, and for each token a column, m and l (16 bytes); no softmax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fds.collectives import Axis, operators
from fds.collectives.functional import apply_function
from fds.errors import KernelError, is_int
from fds.kernels import arguments, vocabulary_parts as parts
from fds.kernels.operators import Function, first_order
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
    own = columns_of(axis, logits.shape[-1], num_classes, targets.device)
    if axis.size == 1:
        return cross_entropy(
            own.counted(logits, -1),
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
        own.of(t, ignore_index),
        axis,
        own.length,
        float(label_smoothing),
        label_smoothing / own.total,
        float(z_loss),
    )
    return reduced(counted(loss, t, own.total, ignore_index).reshape(targets.shape), targets, ignore_index, reduction)


class Columns(NamedTuple):  # which dynamo can make, unlike a frozen class of attrs
    """Where a rank's columns lie in the vocabulary: numbers, or () tensors on the device if ranks have told them."""

    first: int | Tensor
    length: int  # of those that are no padding
    total: int | Tensor  # of the vocabulary, without padding

    def counted(self, x: Tensor, dim: int) -> Tensor:
        """Return `x` without padding along `dim`."""
        return x if x.shape[dim] == self.length else x.narrow(dim, 0, self.length)

    def of(self, targets: Tensor, ignore_index: int) -> Tensor:
        """Return each target's column on this rank, or that it is ignored or elsewhere, (N,)."""
        columns = targets - self.first
        columns = columns.where((columns >= 0) & (columns < self.length), parts.ELSEWHERE)
        return columns.masked_fill_(targets == ignore_index, parts.IGNORED)


def columns_of(axis: Axis, held: int, num_classes: int | None, device: torch.device) -> Columns:
    """Return where the `held` columns of this rank lie in the vocabulary. Raises `KernelError` where they cannot."""
    if num_classes is None and axis.size > 1:
        counts = operators.all_gather(torch.full((1,), held, device=device), axis.handle, 0)
        return Columns(counts[: axis.index].sum(), held, counts.sum().double())  # float64, as quotients with it are
    total = held if num_classes is None else num_classes
    if total < 1:
        raise KernelError("there are no classes", where="num_classes", got=str(total), want="a column or more")
    _check_padded_rows(axis, held, total)
    each, more = divmod(total, axis.size)
    if held == each + (axis.index < more):
        return Columns(axis.index * each + min(axis.index, more), held, total)
    if held * axis.size < total:
        raise KernelError(
            "this rank has too few columns of the vocabulary",
            where=f"rank {axis.index} of axis {axis.name!r}",
            got=str(held),
            want=f"{each + (axis.index < more)} of {total}, or equal parts of at least so many",
        )
    return Columns(axis.index * held, min(max(total - axis.index * held, 0), held), total)


def _check_padded_rows(axis: Axis, held: int, total: int) -> None:
    """Raise `KernelError` for columns of a head that tensor_parallel divides into unequal numbers, padding included.

    Of those this rank's columns do not show where they begin.
    """
    if torch.compiler.is_compiling():  # dynamo reads no ContextVar; what it compiles has run here before
        return
    known = [n for one in current_mode().modules for n in getattr(one, "vocabularies", ())]
    fitting = [n for n in known if n >= total and ranges(n, axis)[axis.index][1] == held]
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
        logits: Tensor, columns: Tensor, axis: Axis, count: int, label_smoothing: float, every: Any, z_loss: float
    ) -> tuple[Tensor, Tensor]:
        told = parts.statistics(logits[:, :count], columns, label_smoothing > 0)
        return parts.combined(gathered(told, axis), label_smoothing, every, z_loss)

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


def gathered(told: Tensor, axis: Axis) -> Tensor:
    """Return the messages of all ranks (ranks, 3 or 4, N), given this one's."""
    return operators.all_gather(told, axis.handle, 0).unflatten(0, (axis.size, len(told)))
