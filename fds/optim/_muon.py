"""Muon: orthogonalized momentum for matrices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod, sqrt

import torch
from torch import Tensor

from fds.errors import OptimizerError, checked_call, did_you_mean
from fds.optim.assembly import Call, Now, Rule, Slots, Tensors, check_numbers, lerp
from fds.optim.base import LRSchedule, Optimizer, Segment

# Factor of the learning rate for a parameter of shape (rows, columns).
RATIOS = {
    "original": lambda rows, columns: sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * sqrt(max(rows, columns)),
}


@checked_call
def muon(
    lr: LRSchedule = 1e-3,
    weight_decay: LRSchedule = 0.1,
    momentum: LRSchedule = 0.95,
    *,
    nesterov: bool = True,
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr: str = "original",
) -> Optimizer:
    """Move every matrix along the orthogonal matrix nearest to its momentum.

    For a parameter p of shape (A, B)::

        b = momentum * b + (1 - momentum) * g
        u = orthogonalize(b)                        nesterov: of momentum * b + (1 - momentum) * g
        p = p - lr * weight_decay * p - lr * ratio * u

    where `orthogonalize` runs `ns_steps` Newton-Schulz iterations in bfloat16, and ratio is sqrt(max(1, A / B))
    ("original") or 0.2 * sqrt(max(A, B)) ("match_rms_adamw", whose updates have the root mean square of AdamW's).

    Slot: momentum_buffer (b). Needs whole parameters (`whole=True`). Of a matrix that is divided over a tensor axis
    every rank gathers the momentum, two bytes an element, and orthogonalizes all of it: the work of one rank, on each.

    Args:
        lr: learning rate; it, weight_decay and momentum may be schedules f(t).
        weight_decay: decoupled.
        momentum: decay of the running mean b.
        nesterov: use Nesterov momentum.
        ns_coefficients: (a, b, c) of the iteration x = a x + b (x x') x + c (x x')^2 x.
        eps: lower bound of the norm that a matrix is divided by.
        ns_steps: number of iterations.
        adjust_lr: name of the ratio.

    Raises `OptimizerError` for a value out of range, and in `init` for a parameter that is not 2-D.
    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982,
    section 2.2; the form is torch.optim.Muon's.

    >>> muon(0.02, adjust_lr="match_rms_adamw")
    muon(lr=0.02, adjust_lr='match_rms_adamw')
    """
    call = Call.of(muon, locals())
    check_numbers("muon", schedule=False, ns_steps=ns_steps)
    if adjust_lr not in RATIOS:
        raise OptimizerError(
            "muon: unknown way to adjust the learning rate",
            where="adjust_lr",
            got=repr(adjust_lr),
            want=" or ".join(map(repr, RATIOS)),
            hint=did_you_mean(str(adjust_lr), RATIOS),
        )
    if len(ns_coefficients) != 3:
        raise OptimizerError(
            "muon: ns_coefficients is not a triple",
            where="ns_coefficients",
            got=repr(ns_coefficients),
            want="(a, b, c)",
            hint="leave it out: (3.4445, -4.775, 2.0315)",
        )
    rule = Rule(call, _rule, slots={"momentum_buffer": 0.0}, check=_check_matrices)
    return rule.optimizer(whole=True, pieces=True)


def orthogonalize(x: Tensor, *, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """Return approximately U V' of the singular value decomposition x = U S V'; x (A, B), the result bfloat16."""
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    y = x.bfloat16().T if tall else x.bfloat16()  # so that the Gram matrix has the shorter side
    y = y / y.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = y @ y.T
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y


def _rule(params: Tensors, grads: Tensors, opt: Slots, now: Now) -> None:
    lr, weight_decay, momentum, nesterov = now.read("lr", "weight_decay", "momentum", "nesterov")
    coefficients, num_steps, eps, adjust_lr = now.read("ns_coefficients", "ns_steps", "eps", "adjust_lr")
    orthogonal = partial(orthogonalize, coefficients=coefficients, num_steps=num_steps, eps=eps)
    for p, g, b, segments in zip(params, now.unscale(grads), opt["momentum_buffer"], now.segments, strict=True):
        now.write(b, lerp(b, g, 1 - momentum))
        direction = lerp(g, b, momentum) if nesterov else b
        p_new = p * (1 - lr * weight_decay)
        for segment in filter(lambda s: s.length, segments):
            assert segment.length == prod(segment.shape), f"muon needs the whole of {segment.name}"
            x, piece = segment.of(direction).view(segment.shape), segment.piece
            x = x if piece is None else piece.whole(x.bfloat16())  # in which it is orthogonalized: half the bytes
            u = orthogonal(x) if piece is None else piece.cut(orthogonal(x))
            segment.of(p_new).sub_(u.reshape(-1).to(p.dtype).mul_(lr * RATIOS[adjust_lr](*x.shape)))
        now.write(p, p_new)


def _check_matrices(segments: Sequence[Sequence[Segment]]) -> None:
    for segment in (s for inside in segments for s in inside):
        if len(segment.shape) != 2:
            raise OptimizerError(
                "muon updates matrices only",
                where=segment.name,
                got=f"shape {segment.shape}",
                want="two dimensions",
                hint='give the others to another optimizer: by_name({"*.weight": muon(), "*": adamw()})',
            )
