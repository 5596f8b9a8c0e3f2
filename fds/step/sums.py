"""Where gradients are added up on one rank: in `.grad` of the leaves, in place."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from fds import autodiff, tree
from fds.errors import LossError
from fds.step import foreach
from fds.step.ranges import in_range
from fds.step.residency.landing import Landing


@attrs.frozen
class Sum:
    """The station `sum`: the dtype in which microbatch gradients are added, None for the gradients' own."""

    dtype: torch.dtype | None = None


# Gradients are cast some at a time: each by itself takes a launch, and all at once would be held in both dtypes.
# Moving 16 MiB takes a GPU as long as a launch takes the host; not measured.
MOST, MOST_BYTES = 64, 2**24


@attrs.define(eq=False)
class Wide:
    """Sums of gradients in another dtype than that of their leaves."""

    dtype: torch.dtype
    sums: dict[int, Tensor | None]  # index of a leaf -> its sum
    waiting: dict[int, Tensor] = tree.new(dict)  # index -> a gradient that is yet to be added
    num_bytes: int = 0  # of those that wait

    def take(self, i: int, leaf: Tensor) -> None:
        """Take the new gradient of leaf `i` away from it."""
        assert leaf.grad is not None
        grad = leaf.grad if leaf.grad.layout is torch.strided else leaf.grad.to_dense()
        leaf.grad = None
        if i in self.waiting:
            self.add()
        self.waiting[i] = grad
        self.num_bytes += grad.nbytes
        if len(self.waiting) >= MOST or self.num_bytes >= MOST_BYTES:
            self.add()

    def add(self) -> None:
        """Add what waits to the sums: one call for all first gradients, and one for all others."""
        first = [i for i in self.waiting if self.sums[i] is None]
        later = [i for i in self.waiting if self.sums[i] is not None]
        for i in first:
            self.sums[i] = torch.empty_like(self.waiting[i], dtype=self.dtype, memory_format=torch.contiguous_format)
        for indices, call in ((first, foreach.copy_), (later, foreach.add_)):
            if indices:
                call([x for i in indices if (x := self.sums[i]) is not None], [self.waiting[i] for i in indices])
        self.waiting.clear()
        self.num_bytes = 0


@attrs.define(eq=False)
class InPlace:
    """Gradients with respect to `leaves`, summed over microbatches: in `.grad`, or in `wide` for another dtype."""

    leaves: list[Tensor]
    dtype: torch.dtype | None = None  # of the sums, None for the leaves' own
    waiting: list[Tensor] = tree.new(list)  # leaves whose `.grad` will be the sum, and is not ours yet
    wide: Wide | None = None  # the sums of any other leaves
    left: list[Tensor] | None = tree.new(list)  # the sums as an `add` left them; None once the last began
    versions: list[int] = tree.new(list)  # and their versions
    landing: Landing | None = None  # where sums go as soon as the last backward is done with them
    landed: dict[int, Tensor] = tree.new(dict)  # index of a leaf -> its sum, where it lives
    landing_now: bool = False  # whether a gradient that comes is the last part of its sum
    predivide: float = 1.0  # what sums were divided by before they were sent: they are not
    kept: None = None  # of what is sent

    @classmethod
    def over(cls, leaves: list[Tensor], dtype: torch.dtype | None, landing: Landing | None = None) -> InPlace:
        """Prepare to sum gradients with respect to `leaves` in `dtype`, and to let them land."""
        others = [i for i, leaf in enumerate(leaves) if dtype is not None and leaf.dtype != dtype]
        wide = Wide(dtype, dict.fromkeys(others)) if dtype is not None and others else None
        made = cls(leaves, dtype, leaves, wide, landing=landing)
        if wide is not None:
            made.waiting = [leaf for leaf in leaves if leaf.dtype == dtype]
            for i in others:
                autodiff.on_gradient(leaves[i], functools.partial(wide.take, i))  # which holds no leaf: no cycle
        if landing is not None:
            for i, leaf in enumerate(leaves):
                if landing.lands(i):
                    autodiff.on_gradient(leaf, functools.partial(made._land, i))
        return made

    def add(self, backward: Callable[[list[Tensor]], None], *, last: bool, in_parts: bool = False) -> None:
        """Add the gradients that `backward(leaves)` puts into `.grad`; autograd adds in place to sums that we own.

        Raises `LossError` where other gradients were added since the last call, or before the first.
        """
        if self.left is not None:
            sums, versions = self._sums()  # lists of other lengths have other versions
            waits = self.wide is not None and self.wide.waiting
            if waits or versions != self.versions or not all(map(operator.is_, sums, self.left)):
                raise backward_inside()
            del sums
        self.left = None  # a backward that fails leaves the gradients that have arrived
        self.landing_now = last and not in_parts
        backward(self.leaves)
        self.landing_now = False
        if self.wide is not None:
            self.wide.add()
        if self.waiting:
            self.waiting = autodiff.own(self.waiting)
        if not last:
            self.left, self.versions = self._sums()

    def _land(self, i: int, leaf: Tensor) -> None:
        """Let the sum of a leaf land, of which this was the last gradient."""
        if not self.landing_now:
            return
        if i in self.landed:
            raise backward_inside()
        assert self.landing is not None
        if self.wide is not None and i in self.wide.sums:
            self.wide.add()
            total, self.wide.sums[i] = self.wide.sums[i], None
        else:
            total, leaf.grad = leaf.grad, None
        assert total is not None
        self.landed[i] = self.landing.land(i, autodiff.exclusive(total))

    def _sums(self) -> tuple[list[Tensor], list[int]]:
        wide = () if self.wide is None else self.wide.sums.values()
        sums = [x for x in (*map(tree.grad_of, self.leaves), *wide) if x is not None]
        return sums, list(map(tree.version_of, sums))

    def used(self) -> list[bool]:
        """Say of every leaf whether a gradient has come for it."""
        if not self.waiting and self.wide is None:
            return [True] * len(self.leaves)
        wide = {} if self.wide is None else self.wide.sums
        come = [grad is not None or wide.get(i) is not None for i, grad in enumerate(map(tree.grad_of, self.leaves))]
        return [has_come or i in self.landed for i, has_come in enumerate(come)]

    @in_range("reduce")
    def finish(self) -> list[Tensor]:
        """Return the sums, contiguous and owned, zeros for a leaf that was not used, and let the leaves go."""
        sums = list(map(tree.grad_of, self.leaves))
        for leaf in self.leaves:
            leaf.grad = None
        for i, wide in self.wide.sums.items() if self.wide is not None else ():
            sums[i] = wide
        if self.waiting or self.wide is not None or self.landing is not None:
            zeros = functools.partial(torch.zeros_like, dtype=self.dtype, memory_format=torch.contiguous_format)
            for i, x in enumerate(self.leaves):
                total = zeros(x) if sums[i] is None and i not in self.landed else sums[i]
                if self.landing is not None and self.landing.lands(i):
                    total = self.landed[i] if total is None else self.landing.land(i, total)
                sums[i] = total
        self.close()
        return sums

    def close(self) -> None:
        """Let go of the leaves, whose hooks may lead here."""
        self.leaves, self.wide, self.waiting, self.left = [], None, [], None
        self.landed = {}


def check_used(used: Sequence[bool], where: str, *, viewed: bool = False) -> None:
    """Raise `LossError` where no trained parameter got a gradient."""
    if used and not any(used):
        raise detached(where, "a graph that leads to none of them", viewed=viewed)


def detached(where: str, got: str, *, viewed: bool = False) -> LossError:
    """Return the error of a loss that does not depend on what is trained, as far as it or a view says."""
    return LossError(
        "the loss does not depend on the parameters",
        where=where,
        got=got,
        want="a value computed from params",
        hint="look for .detach(), .item(), torch.no_grad(), or a module called in place of its fds.functional"
        + "; in the views of parameters, too" * viewed,
    )


def backward_inside() -> LossError:
    """Return the error of a loss that adds gradients by itself."""
    return LossError(
        "the loss runs a backward pass of its own, whose gradients would be added to the step's",
        got=".backward()",
        want="a loss that returns a scalar, which the step differentiates",
        hint="for gradients inside a loss: fds.autodiff.value_and_grad(..., create_graph=True)",
    )
