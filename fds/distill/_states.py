"""Losses between what student and teacher compute on the way: hidden states, attention scores, relations of tokens.

Each is a mean over tokens, `fds.Mean(sum of their losses, number of tokens)`, in float32 or wider. Those with one mask
have one weight, so their totals add up: `fds.Mean(a.total + 0.1 * b.total, a.weight)`. No gradient reaches the teacher.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fds.errors import LossError, is_int
from fds.loss import Mean


def hidden(student: Tensor, teacher: Tensor, *, projection: Tensor | None = None, mask: Tensor | None = None) -> Mean:
    """Return the mean square of the difference between hidden states.

    For the states s (D_s,) and t (D_t,) of a token, and the projection W (D_t, D_s)::

        loss = mean_j((W s - t)_j^2)

    Args:
        student: (..., D_s), floating point.
        teacher: (..., D_t), of the same tokens.
        projection: (D_t, D_s), a parameter to be trained as `nn.Linear` has it; None where D_s is D_t.
        mask: (...,), the weight of each token, booleans or numbers: `targets != -100`. None counts each once.

    Source: Romero et al. 2015, arXiv:1412.6550, equation 3; Jiao et al. 2020, arXiv:1909.10351, equation 8. Raises
    `LossError` for other shapes and dtypes.
    """
    check_pair("hidden", student, teacher, dims=1)
    student, teacher = _counted("hidden", student, mask), _counted("hidden", teacher, mask)
    wide = wide_dtype(student)
    states = student.to(wide)
    if projection is not None:
        shape = (teacher.shape[-1], student.shape[-1])
        if not isinstance(projection, Tensor) or projection.shape != shape:
            raise LossError(
                "distill.hidden: the projection has another shape",
                where="projection",
                got=_kind(projection),
                want=f"{shape}: features of the teacher, and of the student",
            )
        states = torch.nn.functional.linear(states, projection.to(wide))
    if states.shape != teacher.shape:
        raise LossError(
            "distill.hidden: student and teacher have other states",
            got=f"{tuple(states.shape)} and {tuple(teacher.shape)}",
            want="the same shape; where features differ, a projection (D_teacher, D_student)",
        )
    return mean_of("hidden", (states - teacher.detach().to(wide)).square().mean(-1), mask)


def attention(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Mean:
    """Return the mean square of the difference between attention scores, those before the softmax.

    For the scores A (H, S, K) of a row, H heads, S queries, K keys::

        loss_i = mean_{h, j}((A_student - A_teacher)_hij^2)

    over the keys j at which both scores are finite, as those of later tokens are not in a causal model.

    Args:
        student: (B, H, S, K), floating point.
        teacher: of the same shape: a student of fewer heads is compared by `relations`.
        mask: (B, S), the weight of each query; where K is S, keys of weight 0 do not count either.

    Source: Jiao et al. 2020, arXiv:1909.10351, equation 7. Raises `LossError` for other shapes and dtypes.
    """
    check_pair("attention", student, teacher, dims=4)
    if student.shape != teacher.shape:
        raise LossError(
            "distill.attention: student and teacher have other scores",
            got=f"{tuple(student.shape)} and {tuple(teacher.shape)}",
            want="the same heads, queries and keys",
            hint="fds.distill.relations compares models of other heads",
        )
    wide = wide_dtype(student)
    counts = student.isfinite() & teacher.isfinite()
    if mask is not None and _fits("attention", mask, student.shape[::2]) and student.shape[2] == student.shape[3]:
        counts = counts & (mask != 0)[:, None, None, :]
    # zeros in the place of what does not count, before the difference: infinity times 0 is no gradient of 0
    apart = student.to(wide).masked_fill(~counts, 0.0) - teacher.detach().to(wide).masked_fill(~counts, 0.0)
    squares = apart.square().sum((1, 3)) / counts.sum((1, 3)).clamp(min=1)
    return mean_of("attention", squares, mask)


def relations(student: Tensor, teacher: Tensor, *, heads: int, mask: Tensor | None = None) -> Mean:
    """Return the divergence between the relations that tokens have in two models, of whatever widths.

    With the queries, keys or values of a row cut into `heads` relation heads x_h (S, d)::

        R_h = softmax(x_h x_h^T / sqrt(d))        loss_i = mean_h(KL(R_teacher || R_student)_hi)

    Args:
        student: (B, S, D_s), floating point; D_s divides into `heads`.
        teacher: (B, S, D_t).
        heads: of the relations, whatever the models have.
        mask: (B, S), the weight of each token; those of weight 0 are no keys either.

    Source: Wang et al. 2021, arXiv:2012.15828, section 3.1. Raises `LossError` for other shapes and dtypes.
    """
    check_pair("relations", student, teacher, dims=3)
    if (
        student.shape[:2] != teacher.shape[:2]
        or not is_int(heads, 1)
        or student.shape[2] % heads + teacher.shape[2] % heads
    ):
        raise LossError(
            "distill.relations: these are not features of the same tokens, in heads",
            got=f"{tuple(student.shape)}, {tuple(teacher.shape)}, heads={heads!r}",
            want="(B, S, features) of the same tokens, features that divide into heads",
        )
    wide = wide_dtype(student)
    keys = None
    if mask is not None:
        student, teacher = _counted("relations", student, mask), _counted("relations", teacher, mask)
        keys = (mask != 0)[:, None, None, :]

    def log_relations(x: Tensor) -> Tensor:  # (B, heads, S, S)
        x = x.to(wide).unflatten(-1, (heads, -1)).transpose(1, 2)
        scores = x @ x.mT / math.sqrt(x.shape[-1])
        return (scores if keys is None else scores.masked_fill(~keys, torch.finfo(wide).min)).log_softmax(-1)

    log_p = log_relations(teacher.detach())
    divergence = (log_p.exp() * (log_p - log_relations(student))).sum(-1)
    return mean_of("relations", divergence.mean(1), mask)


def mean_of(name: str, losses: Tensor, mask: Tensor | None) -> Mean:
    """Return the mean of losses (...,) by a mask (...,); what it does not count may be NaN."""
    if mask is None:
        return Mean(losses.sum(), losses.numel())
    _fits(name, mask, losses.shape)
    weights = mask.to(losses.dtype)
    return Mean((losses.masked_fill(mask == 0, 0.0) * weights).sum(), weights.sum())


def _counted(name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x (..., D) with zeros where a mask (...,) is 0: of NaN there a gradient of 0 would be made NaN."""
    if mask is None or not _fits(name, mask, x.shape[:-1]):
        return x
    return x.masked_fill((mask == 0)[..., None], 0.0)


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a loss of a tensor: float64 of float64, else float32."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def check_pair(name: str, student: object, teacher: object, *, dims: int) -> None:
    """Raise `LossError` unless both are floating point, of so many dims, none empty at the end, and alike but for it.

    1 dim means 1 or more.
    """
    for who, x in (("student", student), ("teacher", teacher)):
        if not isinstance(x, Tensor) or not x.is_floating_point() or not _has_dims(x, dims):
            raise LossError(
                f"distill.{name}: the {who} has something else",
                where=who,
                got=_kind(x),
                want=f"a floating point tensor of {dims} dims{' or more' * (dims == 1)}, the last not empty",
            )
    assert isinstance(student, Tensor) and isinstance(teacher, Tensor)
    if student.shape[:-1] != teacher.shape[:-1] and dims < 3:
        raise LossError(
            f"distill.{name}: student and teacher saw other tokens",
            got=f"{tuple(student.shape)} and {tuple(teacher.shape)}",
            want="the same shape, but for the last dim",
        )


def _has_dims(x: Tensor, dims: int) -> bool:
    return (x.dim() == dims or x.dim() > dims == 1) and x.shape[-1] > 0


def _fits(name: str, mask: object, shape: torch.Size) -> bool:
    """Return True. Raises `LossError` for a mask of another shape."""
    if isinstance(mask, Tensor) and mask.shape == shape and not mask.is_complex():
        return True
    raise LossError(
        f"distill.{name}: the mask does not say what each token weighs",
        where="mask",
        got=_kind(mask),
        want=f"booleans or numbers of shape {tuple(shape)}",
    )


def _kind(x: object) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)[:60]
