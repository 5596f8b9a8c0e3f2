"""A momentum whose mean over ranks is sent in signs once warm-up is over: what 1-bit Adam and 1-bit LAMB share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import attrs
import torch
from torch import Tensor

from fds.errors import OptimizerError, is_int
from fds.optim.assembly import Now
from fds.optim.exchange import SERVER, WORKER, signed_bytes, signed_sums
from fds.optim.masks import Masks


@attrs.frozen
class AfterWarmUp:
    """The phases of an optimizer that sends signs from some call on."""

    apart: ClassVar[bool] = False
    freeze_step: int

    @classmethod
    def of(cls, factory: str, freeze_step: object) -> AfterWarmUp:
        """Return the phases of an argument `freeze_step`. Raises `OptimizerError` for what is not an int >= 1."""
        if not is_int(freeze_step, 1):
            raise OptimizerError(
                f"{factory}: freeze_step is out of range",
                where="freeze_step",
                got=repr(freeze_step),
                want="an int >= 1",
            )
        return cls(freeze_step)

    def local(self, calls: int) -> bool:
        """Say whether warm-up is over."""
        return calls >= self.freeze_step

    def begins(self, calls: int) -> bool:
        """Say that no call makes errors void."""
        return False

    def bytes_sent(self, lengths: Sequence[int], size: int) -> int:
        """Return the bytes of a sign for each number, sent twice, and of the scales."""
        return signed_bytes(lengths, size)


def summed_moments(
    m: Tensor, v: Tensor, g: Tensor, beta1: float | Tensor, beta2: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return the next momentum and variance (n,) of a warm-up call, in which g (n,) is the whole gradient."""
    return plus(m * beta1, g, 1 - beta1), torch.addcmul(v * beta2, g * (1 - beta2), g)


def sent_momenta(
    grads: list[Tensor], opt: dict[str, list[Tensor]], now: Now, beta1: float | Tensor, masks: Masks
) -> Iterator[Tensor]:
    """Yield the mean over ranks of beta1 * m + (1 - beta1) * g, sent in signs, as float32 where m is narrower.

    Gradients add up to the gradient; `opt` has the momentum, the variance, and the errors, which are written over.
    Where the variance is 0 the momentum is too: that element had no gradient in warm-up.
    """
    assert now.exchange is not None
    share = beta1 / now.exchange.size  # of the momentum that all ranks have: the shares add up, as gradients do
    given = (plus(wide(m) * share, wide(g), 1 - beta1) for g, m in zip(grads, opt["exp_avg"], strict=True))
    sums = signed_sums(now.exchange.axis, given, opt[WORKER], opt[SERVER])
    known = (total.mul_(v > 0) for total, v in zip(sums, opt["exp_avg_sq"], strict=True))
    return (masks.masked(total, segment) for total, (segment,) in zip(known, now.segments, strict=True))


def wide(x: Tensor) -> Tensor:
    """Return x, as float32 if it is narrower."""
    return x.float() if x.dtype.itemsize < 4 else x


def plus(x: Tensor, y: Tensor, factor: float | Tensor) -> Tensor:
    """Return x + factor * y, in one rounding where the factor is on the host."""
    return x.add_(y * factor) if isinstance(factor, Tensor) else x.add_(y, alpha=factor)
