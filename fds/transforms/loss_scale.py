"""Scale the loss by a factor that adapts to the range of 16-bit gradients; skip the steps that overflow.

Fills:  scale, measure           State:  slot `loss_scale`
Law:    at powers of two the identity, bit for bit, while nothing is subnormal or overflows; the factor of a step
        is also what its gradients are divided by, on the step at which it doubles too
Cost:   one pass over the gradients for their norm; no host synchronisation
Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; the rule is DeepSpeed's DynamicLossScaler

`static_loss_scale`: multiply the loss by a constant, so that small 16-bit gradients do not vanish; divide it out again.

Fills:  scale, measure           State:  none
Law:    at a power of two the identity, bit for bit, while nothing is subnormal or overflows
Cost:   one pass over the gradients for their norm; no host synchronisation
Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2

`skip_nonfinite`: skip the update of a step whose gradients are not all finite.

Fills:  measure                  State:  none
Law:    a skipped step leaves params, opt, buffers, step and slots bit-equal; other steps are untouched
Cost:   one pass over the gradients for their norm; no host synchronisation
Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import ComposeError, Rule, count, is_a
from fds.step import Call, Measure, Memory, Step, fill, transform

SLOT = "loss_scale"


@tree.record
class LossScale:
    """The state of a dynamic loss scale; scalars on the step's device."""

    scale: Tensor  # () float64: the factor of the next step
    good_steps: Tensor  # () int64: steps since the last overflow
    hysteresis: Tensor  # () int64: overflows left before the scale falls, this one included


@attrs.frozen
class DynamicScale:
    """The rule: halve on overflow once hysteresis is used up, double after `window` more good steps."""

    initial: float
    window: int
    hysteresis: int
    consecutive_hysteresis: bool
    minimum: float
    draws: ClassVar = False

    def init(self, params: Any, device: torch.device) -> LossScale:
        """Return the slot at the start of a run."""
        return LossScale(
            torch.full((), self.initial, dtype=torch.float64, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
            torch.full((), self.hysteresis, dtype=torch.int64, device=device),
        )

    def scale(self, slots: dict[str, Any], device: torch.device) -> Tensor:
        """Return the factor of this step, () float64."""
        return slots[SLOT].scale

    def metrics(self, slots: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
        """Return this step's `loss_scale`, and whether it is at its minimum."""
        scale = slots[SLOT].scale
        return {"loss_scale": scale.clone(), "at_minimum_scale": scale <= self.minimum}

    def __call__(self, s: LossScale, noted: None, call: Call) -> LossScale:
        """Return the slot after a step that overflowed or did not."""
        skip = call.overflow
        falls = skip & (s.hysteresis == 1)
        grows = ~skip & (s.good_steps > 0) & (s.good_steps % self.window == 0)
        scale = torch.where(falls, (s.scale / 2).clamp(min=self.minimum), torch.where(grows, s.scale * 2, s.scale))
        full = torch.full_like(s.hysteresis, self.hysteresis)
        restored = full if self.consecutive_hysteresis else torch.where(grows, full, s.hysteresis)
        hysteresis = torch.where(skip, (s.hysteresis - 1).clamp(min=1), restored)
        good_steps = torch.where(skip, 0, s.good_steps + 1)
        return LossScale(scale, good_steps, hysteresis)


@transform(window=count(": {name} counts steps"), hysteresis=count(": {name} counts steps"))
def loss_scale(
    initial: float = 2.0**16,
    window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    minimum: float = 1.0,
):
    """Scale the loss dynamically, exactly as DeepSpeed's `DynamicLossScaler` would for any sequence of overflows.

    A step whose gradients are not all finite is skipped: `state.step`, learning rates, parameters and optimizer
    state stay. The scale is then halved, down to `minimum`, unless one of `hysteresis - 1` free overflows was left;
    after every `window` steps without overflow (the first time one later) it doubles and the free overflows return
    (with `consecutive_hysteresis` after every good step).

    In float16 backward begins at scale / number of microbatches, for a `Mean` also divided by about its weight, and
    float16 messages are divided by the number of ranks: with the JSON's other numbers, steps overflow where
    DeepSpeed's do. A batch of weight 0 is skipped, and does not count as an overflow.

    Metrics: `loss_scale` (the factor of this step), `skipped`, `at_minimum_scale`.
    Raises `ComposeError` for values below 1 (`minimum`, `initial`: not positive, or initial < minimum).
    """
    numbers = all(is_a(x, int | float) for x in (initial, minimum))
    if not (numbers and 0 < minimum <= initial < float("inf")):
        raise ComposeError(
            "loss_scale: the scale has no room",
            got=f"initial={initial!r}, minimum={minimum!r}",
            want="0 < minimum <= initial",
        )

    def apply(step: Step) -> Step:
        rule = DynamicScale(float(initial), window, hysteresis, consecutive_hysteresis, float(minimum))
        return fill(
            step,
            scale=rule,
            measure=Measure(norm=True, skips=True),
            memory=Memory(SLOT, rule.init, "replicated", accept=rule, on_skip="run"),
            hint="one loss scale is enough, and it skips what is not finite",
        )

    return apply


@attrs.frozen
class StaticScale:
    """A constant scale."""

    value: float
    draws: ClassVar = False

    def scale(self, slots: dict[str, Any], device: torch.device) -> Tensor:
        """Return the scale, () float64."""
        return torch.full((), self.value, dtype=torch.float64, device=device)

    def metrics(self, slots: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
        """Return `loss_scale`."""
        return {"loss_scale": self.scale(slots, device)}


@transform(
    scale=Rule(lambda x: isinstance(x, int | float) and 0 < x < math.inf, " takes a positive number", "say, 2.0**16")
)
def static_loss_scale(scale: float = 2.0**16):
    """Scale the loss by a constant; a step whose gradients are not all finite is skipped.

    Raises `ComposeError` for a scale that is not positive and finite.
    """

    def apply(step: Step) -> Step:
        static = StaticScale(float(scale))
        return fill(step, scale=static, measure=Measure(norm=True, skips=True), hint="one loss scale is enough")

    return apply


@transform
def skip_nonfinite():
    """Leave everything but `state.calls` as it was where a gradient is NaN or infinite; `metrics["skipped"]` says so.

    The count of skipped steps is `state.calls - state.step`.
    """

    def apply(step: Step) -> Step:
        return fill(step, measure=Measure(norm=True, skips=True), instead=None, hint="a loss scale skips already")

    return apply
