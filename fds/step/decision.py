"""What a step decides of its update: the scale of the summed gradients, and whether they are skipped."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from fds.step.gradients import combined_scale
from fds.step.totals import Totals


@attrs.frozen(eq=False)
class Decision:
    """What a step decides, the same on every rank.

    Attributes:
        totals: of all ranks, with a weight that can be divided by.
        scale: what the summed gradients are too large by, () float64; None is 1.
        norm: of the true gradients, (), where it is measured.
        empty: whether the weight is 0, () bool; None where it cannot be.
        overflow: whether the norm is not finite, () bool; None where nobody asks.
        skip: whether nothing is updated, () bool; None where that cannot be.
        reported: the norm in the metrics.
    """

    totals: Totals
    scale: Tensor | None
    norm: Tensor | None
    empty: Tensor | None
    overflow: Tensor | None
    skip: Tensor | None
    reported: Tensor | None

    @classmethod
    def of(
        cls,
        totals: Totals,
        norm: Tensor | None,
        scale: Tensor | None,
        predivide: float,
        device: torch.device,
        *,
        decides: bool,
    ) -> Decision:
        """Return the decision on totals of all ranks.

        Args:
            totals: of all ranks.
            norm: of the summed gradients, where it is measured.
            scale: of the loss.
            predivide: what gradients were divided by before they were sent.
            device: of the step.
            decides: whether gradients that are not finite are skipped.
        """
        empty = totals.empty()
        totals = totals if empty is None else totals.filled(empty)
        divisor = predivide if totals.divisor is None else totals.divisor * predivide
        total = combined_scale(totals.weight, scale, divisor, device)
        norm = norm if norm is None or total is None else (norm / total).to(norm.dtype)
        overflow = None if norm is None or not decides else ~norm.isfinite()
        skip = overflow if empty is None else empty if overflow is None else overflow | empty
        return cls(totals, total, norm, empty, overflow, skip, norm)

    def shared(self, totals: Totals, norm: Tensor | None, count: int) -> Decision:
        """Return the same for ranks that update other parameters: what each decides, all do, and metrics are of all.

        The scale and the norm stay this rank's, whose gradients they are of.

        Args:
            totals: of all of them.
            norm: the joint norm of the gradients of all of them; the metrics have its root mean square.
            count: how many they are.
        """
        empty = totals.empty()
        overflow = None if norm is None or self.overflow is None else ~norm.isfinite()
        return attrs.evolve(
            self,
            totals=totals if empty is None else totals.filled(empty),
            empty=empty,
            overflow=overflow,
            skip=overflow if empty is None else empty if overflow is None else overflow | empty,
            reported=None if norm is None else norm / count**0.5,
        )

    def metrics(
        self, step: Tensor, rates: dict[str, Tensor], failed: Tensor | None, *, norm: bool
    ) -> dict[str, Tensor]:
        """Return the metrics of a step, () each, with the norm where it is `norm`: always that of the gradient."""
        metrics = {**self.totals.means(), "step": step.clone(), **rates}
        if self.reported is not None and norm:
            metrics["grad_norm"] = self.reported
        if self.skip is not None:
            metrics["skipped"] = self.skip
        if failed is not None:
            metrics["rolled_back"] = failed
        return metrics
