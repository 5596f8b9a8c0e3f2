"""The gradient with which the backward of each microbatch begins: the loss scale over a divisor.

A loss is a total that is divided by its weight after the last microbatch. In float16 that is too late: the gradient of
a sum over a million tokens overflows, and so does a sum of gradients over microbatches that is not divided yet. So a
backward begins at scale / divisor, where the divisor is the same for all microbatches and data ranks and near what is
divided by in the end; only the remaining factor is applied at the end.

Of a plain scalar the divisor is the number of microbatches, known on the host. Of a `Mean` it is that times a power of
two near the weight of the first microbatch, the largest among the data ranks, which ask each other before the first
backward by two numbers in a collective, on the device. Where that weight is 0 on all ranks, the number of elements in
the smallest tensor of the microbatch stands in for it: as many targets as there may be. Weights that differ between
microbatches are exact all the same; one that weighs 100 times the first has gradients 100 times as large, which the
loss scale learns. Without a scale nothing adapts to it, so a step whose gradients are not finite is skipped
(`guesses`), as it is with one.

Where the total itself is of float16, that power of two is at least 1 and at most 2**24: beyond, the seed would be 0 or
infinite as its gradient. Of other totals every unit of weights gives the same bits.

With a loss scale and float16 these are the seeds of other trainers, and the same steps overflow. Where one of
the two is missing, the number of microbatches is rounded down to a power of two, by which float32 is divided exactly;
without a scale it is 1 where sums are wider than float16, since there small gradients vanish before large ones
overflow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Axis
from fds.errors import LossError
from fds.loss import Outcome
from fds.step.sharding.order import Order
from fds.step.totals import Totals

_LARGEST = 2.0**24  # by which 1 can be divided in float16
_EXPONENT = 0x7FF0000000000000  # the bits of a float64 that say its power of two


@attrs.define(eq=False)
class Seeds:
    """The seeds of one call: scale / divisor, the same for all microbatches and data ranks."""

    scale: Tensor | None  # () float64; None is 1
    share: int | None  # the divisor of a plain scalar; None where nothing is divided before the end
    data: Axis | None  # the ranks whose gradients are added
    asked: dict[str, list[str]]  # what ranks have agreed on in earlier calls
    order: Order | None = None  # in which these ranks meet, where each gathers at its own time
    divisor: Tensor | int | None = None  # () float64, or a number on the host; None before the first backward

    @classmethod
    def of(
        cls,
        scale: Tensor | None,
        num_microbatches: int,
        kinds: list[torch.dtype],
        sum_dtype: torch.dtype | None,
        others: Iterable[torch.dtype | None],
        *,
        data: Axis | None,
        asked: dict[str, list[str]],
        order: Order | None,
    ) -> Seeds:
        """Return the seeds of a call.

        Args:
            scale: () float64, of the loss; None is 1.
            num_microbatches: of this rank.
            kinds: dtypes of the parameters that the loss sees.
            sum_dtype: of the sums over microbatches, None for the parameters' own.
            others: dtypes in which anything else is computed or sent.
            data: the ranks whose gradients are added.
            asked: what they have agreed on in earlier calls.
            order: in which they meet, where each gathers at its own time.
        """
        share, sums = None, kinds if sum_dtype is None else [sum_dtype]
        low = torch.float16 in {sum_dtype, *others, *kinds}
        if low and scale is not None:
            share = num_microbatches
        elif scale is not None or torch.float16 in sums:
            share = 1 << (num_microbatches.bit_length() - 1)
        elif low:
            share = 1
        return cls(scale, share, data, asked, order)

    def seed(self, outcome: Outcome, batch: Any) -> Tensor | None:
        """Return where the backward of a microbatch begins, () of its total's dtype; None for 1."""
        self.decide(outcome, batch)
        total, divisor = outcome.total, 1 if self.divisor is None else self.divisor
        if self.scale is not None:
            return (self.scale / divisor).to(total.dtype)
        if isinstance(divisor, Tensor):
            return (1 / divisor).to(total.dtype)
        return None if divisor == 1 else torch.full_like(total, 1 / divisor)

    def decide(self, outcome: Outcome | None, batch: Any = None) -> None:
        """Choose the divisor before the first backward; None on a rank whose first microbatch failed."""
        if self.share is None or self.divisor is not None:
            return
        self.divisor = self.share
        if self.has_weights(outcome):
            if outcome is not None:
                near = torch.stack([_power_near(outcome), _number(_most(batch), outcome.total.device)])
            else:
                assert self.data is not None
                near = torch.zeros(2, dtype=torch.float64, device=self.data.device)
            if self.data is not None:
                self.data.start_all_reduce(near, "max", what="weights").wait()
            self.divisor = torch.where(near[0] == 0, near[1], near[0]) * self.share

    def foreseen(self, totals: Totals, everyone: Axis | None) -> Totals:
        """Return totals of this rank before its last backward, with weight and divisor as all ranks will agree on them.

        Of a `Mean` the data ranks add the weights up, in a collective; `has_weights` was called before.
        """
        if everyone is None:
            return attrs.evolve(totals, divisor=self.divisor)
        assert totals.loss is not None
        weight = _as_tensor(totals.weight, totals.loss.device)
        if self.data is not None and self.asked.get("weights") == ["Mean"]:
            if self.order is not None:
                self.order.settle()
            weight = self.summed(weight)
        elif self.data is not None:
            weight = weight * self.data.size
        divisor = None if self.divisor is None else _as_tensor(self.divisor, weight.device)
        return attrs.evolve(totals, weight=weight, divisor=divisor)

    def summed(self, weight: Tensor) -> Tensor:
        """Return the sum of weights, () each, over the data ranks, in a collective."""
        assert self.data is not None
        total = weight.to(torch.float64, copy=True)
        self.data.start_all_reduce(total, what="weights").wait()
        return total.to(weight.dtype)

    def share_of(self, outcome: Outcome) -> Tensor:
        """Return how much a microbatch adds to the weight over the divisor, () float64; `decide` was called before."""
        weight = _as_tensor(outcome.weight, outcome.total.device).to(torch.float64)
        return weight if self.divisor is None else weight / self.divisor

    def has_weights(self, outcome: Outcome | None) -> bool:
        """Return whether the loss is a `Mean`, on any data rank; they ask each other in the first call."""
        mine = outcome is not None and outcome.weighted
        if self.data is None:
            return mine
        order = self.order if self.order is not None and "gather" in self.order.joins else None
        kinds = self.asked.get("weights")
        if order is not None and kinds != ["scalar"]:
            order.settle()
        if kinds is None:
            answers = self.data.exchange(None if outcome is None else mine)
            kinds = ["Mean" if any(answers) else "scalar"]
            if None not in answers:
                self.asked["weights"] = kinds
            if order is not None and kinds == ["scalar"]:
                order.go_on()
        agreed = kinds == ["Mean"]
        if mine and not agreed:
            raise LossError(
                "the loss is a Mean now and was a scalar in earlier calls, and ranks have agreed on that",
                got="fds.Mean(total, weight)",
                want="fds.Mean in every call, or in none",
                hint="a scalar is fds.Mean(loss, 1)",
            )
        return agreed


def guesses(totals: Totals) -> bool:
    """Say of totals of this rank whether gradients were divided by what was only near their weight, on any rank."""
    return isinstance(totals.divisor, Tensor) or (totals.weighted and totals.divisor is not None)


def _power_near(outcome: Outcome) -> Tensor:
    """Return the largest power of two, () float64, that is not above the weight; 0 for 0 and what is not finite."""
    weight, device = outcome.weight, outcome.total.device
    bits = _as_tensor(weight, device).to(torch.float64).view(torch.int64) & _EXPONENT
    power = torch.where(bits == _EXPONENT, 0, bits).view(torch.float64)
    return torch.where(power == 0, power, power.clamp(1.0, _LARGEST)) if outcome.half else power


def _most(batch: Any) -> int:
    """Return the elements of the smallest tensor of a microbatch, rounded down to a power of two; 1 without tensors."""
    sizes = [x.numel() for x in tree.leaves(batch) if isinstance(x, Tensor) and x.dim()]
    return 1 << (max(min(sizes, default=1), 1).bit_length() - 1)


def _as_tensor(x: Tensor | float, device: torch.device) -> Tensor:
    """Return a number as a tensor () on a device, of a dtype of its own or float64."""
    return x.to(device) if isinstance(x, Tensor) else _number(x, device)


def _number(x: float, device: torch.device) -> Tensor:
    """Return a number as a tensor () float64."""
    return torch.full((), x, dtype=torch.float64, device=device)


def dtype_of(context: Any) -> torch.dtype | None:
    """Return the dtype in which a context computes, as far as it says one."""
    return getattr(context, "dtype", None)
