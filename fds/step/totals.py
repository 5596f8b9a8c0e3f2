"""What microbatches add up to besides gradients: loss, weight and metrics, and the means over all of them."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from fds.collectives import Axis
from fds.errors import LossError
from fds.loss import Outcome


@attrs.define(eq=False)
class Totals:
    """Running sums over microbatches, as device scalars."""

    loss: Tensor | None = None
    weight: Tensor | float = 0
    metrics: dict[str, Tensor] = attrs.field(factory=dict)
    count: int = 0  # microbatches added

    def add(self, outcome: Outcome, where: str) -> None:
        """Add one microbatch. Raises `LossError` where it has other metrics than those before."""
        weight, loss = outcome.weight, outcome.total.detach()
        self.loss = loss if self.loss is None else self.loss + loss
        if self.count and self.metrics.keys() != outcome.metrics.keys():
            raise LossError(
                "microbatches return different metrics", where=where, got=str(sorted(outcome.metrics)),
                want=str(sorted(self.metrics)),
            )  # fmt: skip
        for name, value in outcome.metrics.items():
            held = isinstance(value, Tensor)
            part = value.to(loss.device, non_blocking=True) if held else torch.full((), value, device=loss.device)
            part = part * weight if part.is_floating_point() else part.to(torch.int64, copy=True)
            self.metrics[name] = self.metrics[name] + part if name in self.metrics else part
        self.weight, self.count = self.weight + weight, self.count + 1

    def means(self) -> dict[str, Tensor]:
        """Return the weighted mean of the loss and of float metrics, the sum of integer ones."""
        assert self.loss is not None
        sums = {"loss": self.loss, **self.metrics}
        return {k: (v / self.weight).to(v.dtype) if v.is_floating_point() else v for k, v in sums.items()}


def agree(
    totals: Totals, squares: Tensor | None, buffers: dict[str, Tensor], data: Axis
) -> tuple[Totals, Tensor | None, dict[str, Tensor]]:
    """Add up over the ranks of an axis all that a step decides by, in one small message; average the buffers.

    Args:
        totals: of this rank; metrics must be named alike on all ranks.
        squares: () this rank's share of the squared norm, or None.
        buffers: module statistics; floating ones are averaged, of others rank 0's values are taken.
        data: the axis over which batches differ.
    """
    assert totals.loss is not None
    device, size = totals.loss.device, data.size
    scalars = [totals.loss, *totals.metrics.values()]
    parts = [*scalars, _scalar(totals.weight, device), *([] if squares is None else [squares])]
    flat = [x.reshape(-1).double() for x in parts]
    for b in buffers.values():
        wide = b.reshape(-1).double()
        flat.append(wide / size if b.is_floating_point() else wide if data.index == 0 else torch.zeros_like(wide))
    vector = torch.cat(flat)
    data.start_all_reduce(vector).wait()
    found = list(vector.split([x.numel() for x in flat]))
    read = iter(found)
    loss, *metrics = [next(read).view(()).to(x.dtype) for x in scalars]
    weight = next(read).view(())
    shared = None if squares is None else next(read).view(())
    buffers = {name: next(read).view(b.shape).to(b.dtype) for name, b in buffers.items()}
    return Totals(loss, weight, dict(zip(totals.metrics, metrics, strict=True)), totals.count), shared, buffers


def _scalar(value: Tensor | float, device: torch.device) -> Tensor:
    """Return a number as a () tensor, without the copy that would make the host wait for a device."""
    return value.to(device) if isinstance(value, Tensor) else torch.full((), value, device=device)
