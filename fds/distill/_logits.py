"""Divergence between the distributions over a vocabulary, of whole logits or of a teacher's largest that were stored.

For the logits s and t (V,) of a token, p = softmax(t / T) and q = softmax(s / T)::

    loss = T^2 * KL(p || q) = T^2 * sum_v(p_v * (log p_v - log q_v))        dloss / ds_v = T * (q_v - p_v)

T^2 makes gradients as large whatever the temperature T. Of p only the k largest may be there, K. Then p is renormalised
over them; or, where it is said what all logits sum to, what lies outside of K counts as one more class::

    p_R = 1 - sum_{v in K}(p_v)
    loss = T^2 * (sum_{v in K}(p_v * (log p_v - log q_v)) + p_R * (log p_R - log q_R))
    dloss / ds_v = T * (q_v - p_v) in K, T * q_v * (1 - p_R / q_R) elsewhere

Logits are read in pieces of whole rows, in forward and again in backward: besides logits and their gradient there is no
(N, V) tensor, and what is computed in float32 has 16 MB. Tokens that weigh nothing have a gradient of 0, whatever their
logits.

Sources:
1. Hinton et al. 2015, arXiv:1503.02531, section 2: temperature, and the factor T^2.
2. Peng et al. 2024, arXiv:2410.16215, section 3: the k largest logits of a teacher, stored and renormalised.
3. Anshumann et al. 2025, arXiv:2503.16870, section 3: what renormalising gets wrong, and one class for the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fds.distill._states import check_pair, mean_of, wide_dtype
from fds.errors import LossError, is_number
from fds.kernels.operators import Function, first_order, operator
from fds.loss import Mean

_PIECE = 1 << 22  # elements that are in float32 at a time: 16 MB


def logits(student: Tensor, teacher: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None) -> Mean:
    """Return T^2 times the divergence of the student's distribution from the teacher's, a mean over tokens.

    Args:
        student: (..., V), floating point.
        teacher: of the same shape; its logits may be -infinity.
        temperature: T, above 0: the larger, the more of what the teacher thinks unlikely is learned.
        mask: (...,), the weight of each token, booleans or numbers: `targets != -100`. None counts each once.

    Source: Hinton et al. 2015, arXiv:1503.02531, section 2. Raises `LossError` for other shapes, dtypes, temperatures.
    """
    check_pair("logits", student, teacher, dims=1)
    if student.shape != teacher.shape:
        raise LossError(
            "distill.logits: student and teacher have other vocabularies",
            got=f"{tuple(student.shape)} and {tuple(teacher.shape)}",
            want="logits of one vocabulary",
        )
    temperature = _checked(temperature, "logits")
    losses = _Divergence.apply(_rows(student), _rows(teacher.detach()), temperature)
    return mean_of("logits", losses.view(student.shape[:-1]), mask)


def top_k(
    student: Tensor,
    indices: Tensor,
    values: Tensor,
    *,
    log_sum: Tensor | None = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
) -> Mean:
    """Return what `logits` does of the k largest logits of a teacher, say of `torch.topk`, stored before.

    Args:
        student: (..., V), floating point.
        indices: (..., k) int64, places in the vocabulary, different ones in each row.
        values: (..., k), the teacher's logits there.
        log_sum: (...,), `torch.logsumexp(logits.float() / temperature, -1)` of all its logits: what is not among the k
            counts as one more class. None takes the k for all that there is, of whose probabilities the sum is 1.
        temperature: T, above 0.
        mask: (...,), the weight of each token, booleans or numbers. None counts each once.

    Source: Peng et al. 2024, arXiv:2410.16215; Anshumann et al. 2025, arXiv:2503.16870. Raises `LossError` for other
    shapes, dtypes and temperatures and, on a CPU, places outside of the vocabulary.
    """
    check_pair("top_k", student, values, dims=1)
    temperature = _checked(temperature, "top_k")
    rows, vocabulary = student.shape[:-1], student.shape[-1]
    if not isinstance(indices, Tensor) or indices.dtype is not torch.int64 or indices.shape != values.shape:
        raise LossError(
            "distill.top_k: indices are the places of the values",
            where="indices",
            got=f"{tuple(indices.shape)} {indices.dtype}" if isinstance(indices, Tensor) else repr(indices)[:60],
            want=f"{tuple(values.shape)} torch.int64, as torch.topk returns them",
        )
    if log_sum is not None and (
        not isinstance(log_sum, Tensor) or log_sum.shape != rows or values.shape[-1] >= vocabulary
    ):
        raise LossError(
            "distill.top_k: log_sum says what logits there are besides the k",
            where="log_sum",
            got=f"{log_sum!r:.60}, and {values.shape[-1]} of {vocabulary} logits",
            want=f"{tuple(rows)}, and fewer logits than all",
        )
    if not indices.is_cuda and indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < vocabulary:
        raise LossError(
            "distill.top_k: a place is not in the student's vocabulary",
            where="indices",
            got=f"{int(indices.min())} to {int(indices.max())}",
            want=f"0 to {vocabulary - 1}",
        )
    wide = wide_dtype(student)
    scaled = values.detach().to(wide) / temperature
    log_p = scaled.log_softmax(-1) if log_sum is None else scaled - log_sum.detach().to(wide)[..., None]
    rest = (1 - log_p.exp().sum(-1)).clamp(min=0) * (log_sum is not None)
    flat = _rows(student), _rows(indices), _rows(log_p), rest.flatten()
    losses = _Sparse.apply(*flat, temperature, log_sum is not None)
    return mean_of("top_k", losses.view(rows), mask)


def _checked(temperature: object, name: str) -> float:
    if is_number(temperature) and 0 < temperature < math.inf:
        return float(temperature)
    raise LossError(
        f"distill.{name}: a temperature divides logits",
        where="temperature",
        got=repr(temperature)[:60],
        want="a number above 0",
    )


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _pieces(rows: Tensor) -> Iterator[slice]:
    """Yield slices of the rows (N, V) that are computed at a time."""
    length = max(1, _PIECE // max(1, rows.shape[1]))
    return (slice(start, start + length) for start in range(0, rows.shape[0], length))


def _row_losses(student: Tensor, *_: Any) -> Tensor:
    return student.new_empty(student.shape[:1], dtype=wide_dtype(student))


def _like(dloss: Tensor, student: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(student, memory_format=torch.contiguous_format)


def _divided(x: Tensor, piece: slice, losses: Tensor, temperature: float) -> Tensor:
    """Return a piece of logits over the temperature, in the dtype of the losses."""
    return x[piece].to(losses.dtype) / temperature


@operator("distill_logits", _row_losses)
def _divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    losses = _row_losses(student)
    for piece in _pieces(student):
        log_q = _divided(student, piece, losses, temperature).log_softmax(-1)
        log_p = _divided(teacher, piece, losses, temperature).log_softmax(-1)
        p = log_p.exp()
        losses[piece] = ((log_p - log_q) * p).masked_fill_(p == 0, 0.0).sum(-1)
    return losses.mul_(temperature**2)


@operator("distill_logits_backward", _like)
def _divergence_backward(dloss: Tensor, student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    gradient = _like(dloss, student)
    for piece in _pieces(student):
        d = _divided(student, piece, dloss, temperature).softmax(-1)
        d -= _divided(teacher, piece, dloss, temperature).softmax(-1)
        gradient[piece] = _by_row(d, dloss[piece], temperature)
    return gradient


def _by_row(d: Tensor, dloss: Tensor, temperature: float) -> Tensor:
    """Return gradients of a piece of rows, times what arrived for each: 0 where that is 0."""
    return d.mul_(temperature * dloss[:, None]).masked_fill_((dloss == 0)[:, None], 0.0)


class _Divergence(Function):
    @staticmethod
    def forward(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        return _divergence(student, teacher, temperature)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.temperature = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple:
        return first_order(_divergence_backward, dloss, *ctx.saved_tensors, ctx.temperature), None, None


def _others(z: Tensor, indices: Tensor) -> Tensor:
    """Return the logarithm of what a student gives to all places but these, (n,)."""
    return z.scatter(-1, indices, -math.inf).logsumexp(-1) - z.logsumexp(-1)


@operator("distill_top_k", _row_losses)
def _sparse(
    student: Tensor, indices: Tensor, log_p: Tensor, rest: Tensor, temperature: float, has_rest: bool
) -> Tensor:
    losses = _row_losses(student)
    for piece in _pieces(student):
        z, p = _divided(student, piece, losses, temperature), log_p[piece].exp()
        log_q = z.gather(-1, indices[piece]) - z.logsumexp(-1, keepdim=True)
        losses[piece] = ((log_p[piece] - log_q) * p).masked_fill_(p == 0, 0.0).sum(-1)
        if has_rest:
            log_ratio = rest[piece].log() - _others(z, indices[piece])
            losses[piece] += (rest[piece] * log_ratio).masked_fill_(rest[piece] == 0, 0.0)
    return losses.mul_(temperature**2)


@operator("distill_top_k_backward", _like)
def _sparse_backward(
    dloss: Tensor, student: Tensor, indices: Tensor, log_p: Tensor, rest: Tensor, temperature: float, has_rest: bool
) -> Tensor:
    gradient = _like(dloss, student)
    for piece in _pieces(student):
        z, at = _divided(student, piece, dloss, temperature), indices[piece]
        q = z.softmax(-1)
        inside = q.gather(-1, at) - log_p[piece].exp()
        if has_rest:
            q *= (1 - rest[piece] / _others(z, at).exp())[:, None]
        gradient[piece] = _by_row(q.scatter_(-1, at, inside), dloss[piece], temperature)
    return gradient


class _Sparse(Function):
    @staticmethod
    def forward(
        student: Tensor, indices: Tensor, log_p: Tensor, rest: Tensor, temperature: float, has_rest: bool
    ) -> Tensor:
        return _sparse(student, indices, log_p, rest, temperature, has_rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.temperature, ctx.has_rest = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple:
        options = ctx.temperature, ctx.has_rest
        return first_order(_sparse_backward, dloss, *ctx.saved_tensors, *options), *[None] * 5
