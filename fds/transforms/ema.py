"""Keep an exponential moving average of the parameters.

Fills:  after                    State:  slot `ema` (or `name`): a tree like params
Law:    e <- decay e + (1 - decay) p after every accepted update, from e = the initial parameters
Cost:   the bytes of the parameters; one pass over them
Source: Polyak and Juditsky 1992
"""

from collections.abc import Iterable
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import Rule, StateError, slot_name
from fds.step import Call, Memory, Step, fill, transform


@attrs.frozen
class Average:
    """What follows an update: move the average towards the new parameters."""

    slot: str
    decay: float
    draws: ClassVar = False
    elementwise: ClassVar = True

    def init(self, params: Any, device: torch.device) -> Any:
        """Return a copy of the parameters, 16-bit ones in float32."""
        return tree.map(lambda p: p.float() if tree.is_low(p) else p.clone(), params)

    def __call__(self, slot: Any, params: Any, skip: Tensor | None, call: Call) -> Any:
        """Write the new average into `slot` and return it; where `skip` is true it keeps its bits."""
        for e, p in self.pairs(slot, params):
            if not e.is_floating_point():
                continue
            if skip is None:
                e.lerp_(p.to(e.dtype), 1 - self.decay)
            else:
                e.copy_(torch.where(skip, e, e.lerp(p.to(e.dtype), 1 - self.decay)))
        return slot

    def pairs(self, slot: Any, params: Any) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the averages with the parameters of their names. Raises `StateError` where the names differ."""
        (averages, kept), (leaves, spec) = tree.parts(slot), tree.parts(params)
        if kept == spec:
            return zip(averages, leaves, strict=True)
        averages, leaves = tree.paths(slot), tree.paths(params)
        if averages.keys() != leaves.keys():
            raise StateError(
                "the average is of other parameters",
                where=f"slots.{self.slot}",
                got=", ".join(averages)[:200],
                want=", ".join(leaves)[:200],
                hint='load(slots="init") begins an average anew',
            )
        return [(e, leaves[name]) for name, e in averages.items()]


@transform(
    decay=Rule(
        lambda x: isinstance(x, int | float) and 0 <= x < 1, " takes a decay below 1", "0 <= decay < 1, say 0.999"
    ),
    name=slot_name("slow"),
)
def ema(decay: float, *, name: str = "ema"):
    """Average the parameters into `state.slots[name]`; evaluate it with `attrs.evolve(state, params=...)`.

    Raises `ComposeError` for a decay outside [0, 1) or a name that another transform uses.
    """

    def apply(step: Step) -> Step:
        average = Average(name, float(decay))
        return fill(
            step,
            after=average,
            memory=Memory(name, average.init, "parameters"),
            instead=f"ema({decay}, name={name + '_2'!r})",
            hint="give one of them another name",
        )

    return apply
