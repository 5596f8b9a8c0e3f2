"""What of the station `after` writes parameters: ranks whose parameters have drifted apart agree on them again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
from torch import Tensor

from fds.collectives.traffic import Expected
from fds.errors import ComposeError
from fds.layout import Segment
from fds.optim import Optimizer
from fds.step.call import Call
from fds.step.structure import Structure

Slots = dict[str, list[Tensor | None]]


class Synchronize(Protocol):
    """An entry of the station `after` that writes parameters: how ranks along an axis of role "local" agree on them.

    It says so by an attribute `writes = "params"`, and is called before all others, which follow what was agreed on.

    What it remembers lies in the state beside the optimizer's own, `state.opt`, a slice for each that is trained.
    """

    def init(self, segments: Sequence[Sequence[Segment]], *, params: list[Tensor]) -> Slots:
        """Return the slots of a first state, as `Optimizer.init` does."""
        ...

    def owns(self, slot: str) -> bool:
        """Say by its name whether a slot is one of these."""
        ...

    def agrees(self, slot: str) -> bool:
        """Say whether a slot is one of these, and the same on all ranks along the axis."""
        ...

    def __call__(
        self, structure: Structure, params: list[Tensor], opt: Slots, *, skip: Tensor | None, call: Call
    ) -> None:
        """Write into the trained slices, 1-D, and into the slots; where `skip` is true nothing may change."""
        ...

    def bytes_sent(self, structure: Structure) -> tuple[float, float]:
        """Return the most bytes that this rank sends in one call, and the mean over many calls."""
        ...

    def messages(self, structure: Structure) -> Iterable[Expected]:
        """Return the messages of the call in which it sends most, for `describe`."""
        ...


def remembering(optimizer: Optimizer, synchronize: Synchronize) -> Optimizer:
    """Return the optimizer with the slots of a filler beside its own, which its update leaves alone.

    Its `init` raises `ComposeError` where both have a slot of one name.
    """

    def init(segments: Sequence[Sequence[Segment]], *, params: list[Tensor]) -> Slots:
        own = optimizer.init(segments, params=params)
        if both := list(filter(synchronize.owns, own)):
            raise ComposeError(
                "an optimizer has a slot that ranks need to synchronize",
                where="station 'optimizer'",
                got=f"{optimizer}: {', '.join(both)}",
                want="slots of other names",
            )
        return {**own, **synchronize.init(segments, params=params)}

    def update(grads: list[Tensor], opt: Slots, params: list[Tensor], **now: Any) -> tuple[list[Tensor], Slots]:
        more = {slot: opt.pop(slot) for slot in [*opt] if synchronize.owns(slot)}
        params, own = optimizer.update(grads, opt, params, **now)
        return params, {**own, **more}

    def bind(shapes: Mapping[str, tuple[int, ...]]) -> Optimizer:
        return remembering(optimizer.bound(shapes), synchronize)

    bound = attrs.evolve(optimizer, init=init, update=update)
    return bound if optimizer.bind is None else attrs.evolve(bound, bind=bind)


def _of(step: Any) -> Optimizer | None:
    optimizer, synchronize = step.optimizer, step.synchronize
    return optimizer if optimizer is None or synchronize is None else remembering(optimizer, synchronize)


REMEMBERING: Any = attrs.Factory(_of, takes_self=True)  # of a record with both stations
