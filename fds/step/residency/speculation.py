"""Speculation: slices that live elsewhere are updated in backward, before the step knows its norm, or what it skips.

What the step decides is taken for granted: that which it would do with gradients of norm 0, which nothing clips and
which are finite. Once it has decided, numbers say whether that was right. If not, all that was updated ahead is updated
again, from the old values: what is written ahead is never the old state's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from fds.collectives import Axis
from fds.errors import ComposeError
from fds.optim import Optimizer
from fds.step.ranges import profiled
from fds.step.residency.apart import Apart
from fds.step.residency.chunks import is_separate
from fds.step.residency.landing import Landing
from fds.step.residency.visit import Visit
from fds.step.totals import Totals


@attrs.frozen(eq=False)
class Granted:
    """What an update in backward takes for granted: what the step decides of the optimizer's arguments.

    Attributes:
        scale: what the summed gradients are too large by, () float64; None is 1.
        skip: whether the update is skipped, () bool; None where it cannot be.
        wide: whether some gradients are float64: then `scale` is divided out before the update.
    """

    scale: Tensor | None
    skip: Tensor | None
    wide: bool

    @property
    def grad_scale(self) -> Tensor | None:
        """What the optimizer divides gradients by, () float32."""
        return None if self.scale is None or self.wide else self.scale.to(torch.float32)

    @property
    def divisor(self) -> Tensor | None:
        """What gradients are divided by before it gets them, () float64."""
        return self.scale if self.wide else None


class Sums(Protocol):
    """Where gradients are added up."""

    @property
    def predivide(self) -> float:
        """What they are divided by before they are sent."""
        ...

    @property
    def landing(self) -> Landing | None:
        """Where they go as each is final."""
        ...


@attrs.define(eq=False)
class Speculation:
    """The part of one call's update that begins in backward.

    Attributes:
        apart: the leaves that it writes.
        grant: `(totals of all ranks, of this rank, predivide, wide)` -> what the update takes for granted; gradients
            were divided by `predivide` before they were sent, and `wide` says whether some are float64.
        visits: makes the visit of what is updated ahead.
        everyone: the ranks that share the step.
    """

    apart: Apart
    grant: Callable[[Totals, Totals, float, bool], Granted]
    visits: Callable[[Granted], Visit]
    everyone: Axis | None
    granted: Granted | None = None
    visit: Visit | None = None

    def foresee(self, every: Totals, own: Totals, sums: Sums) -> None:
        """Take for granted what the totals of all ranks lead to, before the last backward; `own` are this rank's."""
        assert sums.landing is not None
        self.granted = self.grant(every, own, sums.predivide, sums.landing.wide)
        self.visit = self.visits(self.granted)

    def tell(self, grads: Mapping[int, Tensor]) -> None:
        """Take gradients that are complete, and update what waits for nothing else."""
        assert self.visit is not None
        with torch.no_grad(), profiled("optimizer"):
            self.visit.tell(grads)

    def settle(self) -> None:
        """Wait until what was updated is written; all gradients are complete."""
        if self.visit is not None:
            assert self.visit.at == len(self.visit.chunks)
            self.visit.settle()

    def again(self, failed: Tensor) -> Collection[int] | None:
        """Return of which slices the chunks are to be updated again; None for all, where the step decided otherwise.

        Else of those that were updated before more was added to their gradients, as ranks that take other paths do.
        """
        if self.visit is None or not self.visit.chunks:
            return ()
        return None if bool(failed) else self.visit.stale

    def close(self) -> None:
        """Wait for what is read and written, whatever comes of it."""
        if self.visit is not None:
            self.visit.close()

    def fails(self, scale: Tensor | None, skip: Tensor | None, device: torch.device, *, changed: bool) -> Tensor:
        """Return whether the step has decided otherwise, or has `changed` gradients: () bool on its device."""
        found = torch.full((), changed, dtype=torch.bool, device=device)
        granted = (scale, skip) if self.granted is None else (self.granted.scale, self.granted.skip)
        for mine, other in zip(granted, (scale, skip), strict=True):
            found |= mine is not other if mine is None or other is None else mine != other
        return found


def check_speculation(conditions: Sequence[Any], optimizer: Optimizer, *, in_turn: bool, communicates: bool) -> None:
    """Raise `ComposeError` for a step that has nothing to update before it has decided, or could not take it back.

    Args:
        conditions: the gradient maps.
        optimizer: of the step.
        in_turn: whether microbatches run one after another.
        communicates: whether ranks hold slices, about which an optimizer that is not elementwise asks them.
    """
    changing = next((one for one in conditions if getattr(one, "needs", None) != "norm"), None)
    if changing is not None:
        got = getattr(changing, "__name__", None) or repr(changing)
        raise _refused("gradients are changed once all are there", got, "maps of the norm, as clip_by_global_norm")
    if not is_separate(optimizer):
        raise _refused("the optimizer updates all slices at once", repr(optimizer), "one that treats each by itself")
    if communicates and optimizer.elementwise is False:
        raise _refused("the optimizer asks other ranks", repr(optimizer), "one that treats every element by itself")
    if not in_turn:
        raise _refused("stages end their backwards at several times", "pipeline(...)", "a step without a pipeline")


def _refused(why: str, got: str, want: str) -> ComposeError:
    return ComposeError(
        f"nothing can be updated before the step has decided: {why}",
        where="station 'place', speculate",
        got=got[:200],
        want=want,
        hint="speculate=False",
    )
