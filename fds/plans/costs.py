"""`Costs`: time and memory of the stages, for simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from fds.errors import PlanError, is_number

PerStage = float | Sequence[float]


def _numbers(name: str):
    def check(_self: object, _field: object, value: PerStage) -> None:
        values = [value] if isinstance(value, int | float) else list(value)
        if not values or any(isinstance(v, bool) or not v >= 0 or math.isinf(v) for v in values):
            raise PlanError(
                "a cost is negative or not finite", where=name, got=repr(value), want="one number, or one per stage"
            )

    return check


def _as_tuple(value: PerStage) -> float | tuple[float, ...]:
    return value if isinstance(value, int | float) else tuple(value)


@attrs.frozen
class Costs:
    """The cost of one microbatch at each stage: one number for all stages, or one per stage.

    Times share any unit (seconds if measured), and so do bytes: with `activation_bytes=1` the peak of bytes is the peak
    number of microbatches.
    """

    forward: PerStage = attrs.field(default=1.0, converter=_as_tuple, validator=_numbers("forward"))
    backward_input: PerStage = attrs.field(default=1.0, converter=_as_tuple, validator=_numbers("backward_input"))
    backward_weight: PerStage = attrs.field(default=1.0, converter=_as_tuple, validator=_numbers("backward_weight"))
    activation_bytes: PerStage = attrs.field(default=1.0, converter=_as_tuple, validator=_numbers("activation_bytes"))
    message_bytes: PerStage = attrs.field(default=0.0, converter=_as_tuple, validator=_numbers("message_bytes"))
    latency: float = attrs.field(default=0.0, validator=_numbers("latency"))  # of a message between two ranks
    bytes_per_second: float = attrs.field(default=math.inf)  # of a message between two ranks

    @bytes_per_second.validator  # type: ignore[attr-defined]
    def _check_bandwidth(self, _field: object, value: float) -> None:
        if not is_number(value) or not value > 0:
            raise PlanError(
                "the bandwidth is not positive", where="bytes_per_second", got=repr(value), want="a number above 0"
            )

    def at(self, name: str, stage: int) -> float:
        """Return a cost at a stage: `costs.at("forward", 2)`. Raises `PlanError` for a stage without cost."""
        value = getattr(self, name)
        if isinstance(value, int | float):
            return value
        if not 0 <= stage < len(value):
            raise PlanError(
                "there is no cost for this stage",
                where=f"costs.{name}",
                got=f"{len(value)} numbers",
                want=f"at least {stage + 1}, one for each stage, or one number for all",
            )
        return value[stage]

    def message(self, stage: int) -> float:
        """Return the time of a message between this stage and the next, on different ranks."""
        return self.latency + self.at("message_bytes", stage) / self.bytes_per_second
