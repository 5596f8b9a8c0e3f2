"""What optimizers share that send signs: in which calls they do, the momentum that they send, and masks of it."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from fds.errors import OptimizerError, did_you_mean, is_int
from fds.layout import Segment
from fds.optim.assembly import Now
from fds.optim.exchange import SERVER, WORKER, Phases, signed_sums


def check_counts(factory: str, **counts: object) -> None:
    """Raise `OptimizerError` for what is not an int >= 1."""
    for name, value in counts.items():
        if not is_int(value, 1):
            raise OptimizerError(
                f"{factory}: {name} is out of range", where=name, got=repr(value)[:80], want="an int >= 1"
            )


@attrs.frozen
class AfterWarmUp(Phases):
    """The phases of an optimizer that sends signs from some call on."""

    apart: ClassVar[bool] = False
    freeze_step: int

    @classmethod
    def of(cls, factory: str, freeze_step: int) -> AfterWarmUp:
        """Return the phases of an argument `freeze_step`. Raises `OptimizerError` for what is not an int >= 1."""
        check_counts(factory, freeze_step=freeze_step)
        return cls(freeze_step)

    def local(self, calls: int) -> bool:
        """Say whether warm-up is over."""
        return calls >= self.freeze_step


@attrs.frozen
class GrowingIntervals(Phases):
    """The phases of 0/1 Adam. Calls are counted from 1 here; those of an interval of k are the multiples of k."""

    apart: ClassVar[bool] = True
    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def __attrs_post_init__(self) -> None:
        check_counts("zero_one_adam", **attrs.asdict(self))

    def local(self, calls: int) -> bool:
        """Say whether gradients stay on their ranks: in all calls but those that update the variance."""
        if calls >= self.var_freeze_step:
            return True
        last, interval = 0, 1
        while calls + 1 > (last := (last // interval + self.var_update_scaler) * interval):  # the last of this interval
            interval *= 2
        return (calls + 1) % interval > 0

    def begins(self, calls: int) -> bool:
        """Say whether local steps begin: what messages of gradients have lost is nothing to those of updates."""
        return calls == self.var_freeze_step

    def agrees(self, calls: int) -> bool:
        """Say whether, where ranks take steps of their own, they agree in the end."""
        doublings = (calls - self.var_freeze_step) // self.local_step_scaler
        clipper = self.local_step_clipper
        return (calls + 1) % min(clipper, 1 << min(doublings, clipper.bit_length())) == 0


@attrs.frozen(eq=False)
class Masks:
    """Tensors of 0 and 1 by pattern, for the momentum of the parameters whose names match."""

    factory: str  # the optimizer, in errors
    by_pattern: Mapping[str, Tensor]

    @classmethod
    def of(cls, factory: str, masks: Any) -> Masks:
        """Return the masks of an argument `exp_avg_mask`. Raises `OptimizerError` for anything but tensors by name."""
        if masks is None:
            return cls(factory, {})
        good = isinstance(masks, Mapping) and all(
            isinstance(x, Tensor) and isinstance(k, str) for k, x in masks.items()
        )
        if not good:
            raise OptimizerError(
                f"{factory}: exp_avg_mask is not tensors by name",
                where="exp_avg_mask",
                got=repr(masks)[:80],
                want="{pattern: tensor of 0 and 1, ...}",
            )
        return cls(factory, {pattern: mask.detach() for pattern, mask in masks.items()})

    def masked(self, x: Tensor, segment: Segment) -> Tensor:
        """Return x (n,), the momentum of a parameter, times the mask of the first pattern that its name matches."""
        mask = self._of(segment)
        return x if mask is None else x * _flat(mask, segment).to(x)

    def check_names(self, names: Sequence[str]) -> None:
        """Raise `OptimizerError` for a pattern that no parameter's name matches."""
        for pattern in self.by_pattern:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise OptimizerError(
                    f"{self.factory}: a pattern matches no parameter",
                    where=f"exp_avg_mask, {pattern!r}",
                    got=f"{len(names)} parameters",
                    want="the name of a parameter, with * for any part of it",
                    hint=did_you_mean(pattern, names) if names else "there is no trainable parameter",
                )

    def check_shapes(self, segments: Sequence[Sequence[Segment]]) -> None:
        """Raise `OptimizerError` for a mask of a shape that does not expand to its parameter's."""
        for segment in (s for inside in segments for s in inside):
            mask = self._of(segment)
            if mask is None:
                continue
            try:
                _flat(mask, segment)
            except RuntimeError as error:
                raise OptimizerError(
                    f"{self.factory}: a mask has another shape than its parameter",
                    where=f"exp_avg_mask, {segment.name}",
                    got=str(tuple(mask.shape)),
                    want=f"a shape that expands to {tuple(segment.shape)}",
                ) from error

    def _of(self, segment: Segment) -> Tensor | None:
        matching = (mask for pattern, mask in self.by_pattern.items() if fnmatch.fnmatchcase(segment.name, pattern))
        return next(matching, None)


def _flat(mask: Tensor, segment: Segment) -> Tensor:
    """Return a mask for every element of a parameter (n,)."""
    return mask.expand(segment.shape).reshape(-1)


def write_moments(m: Tensor, v: Tensor, g: Tensor, now: Now) -> None:
    """Write the next momentum and variance (n,) in a call in which g (n,) is the whole gradient."""
    beta1, beta2 = now.read("beta1", "beta2")
    now.write(m, plus(m * beta1, g, 1 - beta1))
    now.write(v, torch.addcmul(v * beta2, g * (1 - beta2), g))


def sent_momenta(grads: list[Tensor], opt: dict[str, list[Tensor]], now: Now) -> Iterator[Tensor]:
    """Yield the mean over ranks of beta1 * m + (1 - beta1) * g, sent in signs, as float32 where m is narrower.

    Gradients add up to the gradient; `opt` has the momentum, the variance, and the errors, which are written over.
    Where the variance is 0 the momentum is too: that element had no gradient in warm-up.
    """
    assert now.exchange is not None
    beta1, masks = now.read("beta1", "masks")
    share = beta1 / now.exchange.size  # of the momentum that all ranks have: the shares add up, as gradients do
    shares = (plus(wide(m) * share, wide(g), 1 - beta1) for g, m in zip(grads, opt["exp_avg"], strict=True))
    sums = signed_sums(now.exchange.axis, shares, opt[WORKER], opt[SERVER])
    moving = (total.mul_(v > 0) for total, v in zip(sums, opt["exp_avg_sq"], strict=True))
    return (masks.masked(total, segment) for total, (segment,) in zip(moving, now.segments, strict=True))


def wide(x: Tensor) -> Tensor:
    """Return x, as float32 if it is narrower."""
    return x.float() if x.dtype.itemsize < 4 else x


def plus(x: Tensor, y: Tensor, factor: float | Tensor) -> Tensor:
    """Return x + factor * y, in one rounding where the factor is on the host."""
    return x.add_(y * factor) if isinstance(factor, Tensor) else x.add_(y, alpha=factor)
