"""Sums over microbatches besides gradients (loss, weight, metrics), their means, and what a step decides by them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Axis
from fds.errors import LossError
from fds.loss import Outcome
from fds.step.agreement import Agreement
from fds.step.gradients import combined_scale
from fds.step.sums import detached

_VALUE = operator.attrgetter("value")
_ROUNDING = 2.0**-12  # in which losses of ranks may differ: as much as 2**11 roundings of float32


@attrs.define(eq=False)
class Totals:
    """Running sums over microbatches, as device scalars."""

    loss: Tensor | None = None
    weight: Tensor | float = 0
    metrics: dict[str, Tensor] = tree.new(dict)
    count: int = 0  # microbatches added
    weighted: bool = False  # some are `Mean`s, whose weights may be 0
    divisor: Tensor | float | None = None  # of the seeds of their gradients; 0 where another rank knows it, None for 1

    def add(self, outcome: Outcome, where: str) -> None:
        """Add one microbatch. Raises `LossError` where it has other metrics than those before."""
        weight, loss = outcome.weight, outcome.total.detach()
        self.loss = loss if self.loss is None else self.loss + loss
        if self.count and self.metrics.keys() != outcome.metrics.keys():
            raise LossError(
                "microbatches return different metrics",
                where=where,
                got=str(sorted(outcome.metrics)),
                want=str(sorted(self.metrics)),
            )
        for name, value in outcome.metrics.items():
            if isinstance(value, Tensor):
                if value.device.type == "cpu" and loss.device.type != "cpu":  # captured, a copy would read freed memory
                    value = torch.full((), value.item(), dtype=value.dtype, device=loss.device)
                part = value.to(loss.device)  # not asynchronously: on the CPU it could be read too early
            else:
                part = torch.full((), value, device=loss.device)
            part = _times(part, weight) if part.is_floating_point() else part.to(torch.int64, copy=True)
            self.metrics[name] = self.metrics[name] + part if name in self.metrics else part
        self.weight, self.count, self.weighted = self.weight + weight, self.count + 1, self.weighted or outcome.weighted

    def empty(self) -> Tensor | None:
        """Return whether the sum of all weights is 0, () bool; None where it cannot be."""
        assert self.loss is not None
        if not self.weighted:
            return None
        if isinstance(self.weight, Tensor):
            return self.weight == 0
        return None if self.weight else torch.ones((), dtype=torch.bool, device=self.loss.device)

    def filled(self, empty: Tensor) -> Totals:
        """Return the same with weight 1 where it is 0: then the means are the sums, which are finite."""
        return attrs.evolve(self, weight=torch.where(empty, 1, self.weight))

    def silent(self) -> Totals:
        """Return the same as zeros: those of a rank whose totals another rank has too."""
        loss, weight = (torch.zeros_like(x) if isinstance(x, Tensor) else 0 for x in (self.loss, self.weight))
        metrics = {name: torch.zeros_like(x) for name, x in self.metrics.items()}
        return attrs.evolve(self, loss=loss, weight=weight, metrics=metrics)

    def put(
        self, agreement: Agreement, *, used: bool = True, repeats: tuple[int, int] = (0, 1)
    ) -> Callable[[], Totals]:
        """Put these totals in; return the function that returns the sums of all ranks, once they are counted.

        Args:
            agreement: of ranks whose metrics are named alike.
            used: whether a gradient came on this rank.
            repeats: of the ranks that compute the same totals, which one this is, and how many: the first's count.

        That function raises `LossError` on the CPU, where reading a number is free, where no rank uses any parameter,
        and where ranks that compute the same found other losses.
        """
        axis = agreement.axis
        if axis is None:
            return lambda: self
        totals = self if repeats[0] == 0 else self.silent()
        assert totals.loss is not None and self.loss is not None
        device = totals.loss.device

        full = functools.partial(torch.full, (), dtype=torch.float64, device=device)
        weight = totals.weight.to(device) if isinstance(totals.weight, Tensor) else full(totals.weight)
        uses, loss, weight = map(agreement.sum, (full(used), totals.loss, weight))
        names = sorted(totals.metrics)
        metrics = list(map(agreement.sum, map(totals.metrics.__getitem__, names)))
        divisor = same = None
        if totals.divisor is not None:
            is_known = isinstance(totals.divisor, Tensor) or totals.divisor > 0
            number = totals.divisor.to(device) if isinstance(totals.divisor, Tensor) else full(totals.divisor)
            divisor = agreement.sum(torch.stack([number, full(is_known)]))
        if repeats[1] > 1:
            same = agreement.each(self.loss.double() / self.weight, lambda losses: losses)

        def counted() -> Totals:
            if device.type == "cpu" and not float(uses.value):
                raise detached("on any rank", "a graph that leads to none of them")
            return attrs.evolve(
                totals,
                loss=loss.value if same is None else _same_loss(same.value, loss.value, repeats[1], axis),
                weight=weight.value,
                metrics=dict(zip(names, map(_VALUE, metrics), strict=True)),
                divisor=None if divisor is None else divisor.value[0] / divisor.value[1],
            )

        return counted

    def means(self) -> dict[str, Tensor]:
        """Return the weighted mean of the loss and of float metrics, the sum of integer ones."""
        assert self.loss is not None
        sums = {"loss": self.loss, **self.metrics}
        return {k: (v / self.weight).to(v.dtype) if v.is_floating_point() else v for k, v in sums.items()}


def _times(value: Tensor, weight: Tensor | float) -> Tensor:
    """Return value x weight; 0 for weight 0, whatever the value: the mean of nothing is often not a number."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, value * weight)
    return value * weight if weight else torch.zeros_like(value)


def averaged(buffers: dict[str, Tensor], agreement: Agreement, data: Axis | None) -> Callable[[], dict[str, Tensor]]:
    """Put in what the ranks along `data` make of module statistics; return the function that returns it afterwards.

    Floating ones are averaged, of others the first rank's values are taken. Another message where not all have them.
    """
    if data is None or not buffers:
        return buffers.copy
    holders, first = agreement.among(data, "buffers"), data.index == 0
    entries = {
        name: holders.sum(
            b if first or b.is_floating_point() or b.is_complex() else torch.zeros_like(b), divided_by=data.size
        )
        for name, b in buffers.items()
    }
    return lambda: {name: entry.value for name, entry in entries.items()}


Put = Callable[[Agreement], Callable[[], None]]
Agreed = tuple[Totals, Tensor | None, dict[str, Tensor]]  # totals, norm and module statistics


def put_all(
    agreement: Agreement,
    totals: Totals,
    norm: Tensor | None,
    buffers: dict[str, Tensor],
    data: Axis | None,
    puts: Sequence[Put],
    *,
    used: bool = True,
    repeats: tuple[int, int] = (0, 1),
) -> Callable[[], Agreed]:
    """Put in all that a step decides by; return the function that returns it of all ranks, once it is counted.

    Args:
        agreement: of the ranks that decide together.
        totals: of this rank; `used` and `repeats` are those of `Totals.put`.
        norm: () of what only this rank has of the gradients, or None.
        buffers: module statistics, which the ranks along `data` have in common.
        data: those ranks.
        puts: put in what others have, before all else; each returns the function that takes what came of it.
    """
    takes: list[Callable[[], None]] = []
    for put in puts:
        takes += [put(agreement)]
    counted, common = totals.put(agreement, used=used, repeats=repeats), averaged(buffers, agreement, data)
    joint = None if norm is None else agreement.norm(norm)

    def agreed() -> Agreed:
        for take in takes:
            take()
        return counted(), None if joint is None else joint.value, common()

    return agreed


def _same_loss(computed: Tensor, loss: Tensor, count: int, everyone: Axis) -> Tensor:
    """Return the loss; raise `LossError` where ranks that compute it together have other ones (N,).

    On a GPU, which would have to be waited for, it is NaN then. `count` ranks after each other have the same batch.
    Rounding may differ: a matrix at another address, or more threads, are sums in another order (measured).
    """
    groups = computed.view(-1, count)
    first = groups[:, :1]
    rounding = max(_ROUNDING, 2 * torch.finfo(loss.dtype).eps)  # a loss of 16 bits is one of its few numbers
    bound = rounding * torch.maximum(groups.abs(), first.abs()).clamp(min=_ROUNDING)
    differs = ~((groups == first) | (groups.isnan() & first.isnan()) | ((groups - first).abs() <= bound))
    if loss.device.type != "cpu":
        return torch.where(differs.any(), torch.nan, loss)
    if differs.any():
        other = int(differs.view(-1).nonzero()[0])
        begin = other - other % count
        raise LossError(
            "ranks that compute one loss together found different losses",
            where=f"axis {everyone.name!r}: ranks {begin} and {other}",
            got=f"{float(computed[begin])!r} and {float(computed[other])!r}",
            want="the same loss on all ranks of a tensor axis",
            hint="the loss reads this rank's number, or pieces of features or parameters that nothing puts together",
        )
    return loss


# given, before the last backward, those of all ranks and of this one, and what sums are divided by before they are sent
Expect = Callable[[Totals, Totals, float], None]


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
