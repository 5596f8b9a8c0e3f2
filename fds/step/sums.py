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
from fds.step.ranges import in_range


@attrs.frozen
class Sum:
    """The station `sum`: the dtype in which microbatch gradients are added, None for the gradients' own."""

    dtype: torch.dtype | None = None


@attrs.define(eq=False)
class InPlace:
    """Gradients with respect to `leaves`, summed over microbatches: in `.grad`, or in `wide` for another dtype."""

    leaves: list[Tensor]
    dtype: torch.dtype | None = None  # of the sums, None for the leaves' own
    waiting: list[Tensor] = tree.new(list)  # leaves whose `.grad` will be the sum, and is not ours yet
    wide: dict[int, Tensor | None] = tree.new(dict)  # index of any other leaf -> its sum
    left: list[Tensor] | None = tree.new(list)  # the sums as an `add` left them; None once the last began
    versions: list[int] = tree.new(list)  # and their versions
    predivide: float = 1.0  # what sums were divided by before they were sent: they are not
    kept: None = None  # of what is sent

    @classmethod
    def over(cls, leaves: list[Tensor], dtype: torch.dtype | None) -> InPlace:
        """Prepare to sum gradients with respect to `leaves` in `dtype`."""
        if dtype is None:
            return cls(leaves, dtype, leaves)
        sums = cls(leaves, dtype, [leaf for leaf in leaves if leaf.dtype == dtype])
        for i, leaf in enumerate(leaves):
            if leaf.dtype != dtype:
                sums.wide[i] = None
                autodiff.on_gradient(leaf, _widen(sums.wide, i, dtype))
        return sums

    def add(self, backward: Callable[[list[Tensor]], None], *, last: bool, in_parts: bool = False) -> None:
        """Add the gradients that `backward(leaves)` puts into `.grad`; autograd adds in place to sums that we own.

        Raises `LossError` where other gradients were added since the last call, or before the first.
        """
        if self.left is not None:
            held, versions = self._held()  # lists of other lengths have other versions
            if versions != self.versions or not all(map(operator.is_, held, self.left)):
                raise backward_inside()
            del held
        self.left = None  # a backward that fails leaves the gradients that have arrived
        backward(self.leaves)
        if self.waiting:
            self.waiting = autodiff.own(self.waiting)
        if not last:
            self.left, self.versions = self._held()

    def _held(self) -> tuple[list[Tensor], list[int]]:
        held = [x for x in (*map(tree.grad_of, self.leaves), *self.wide.values()) if x is not None]
        return held, list(map(tree.version_of, held))

    def used(self) -> list[bool]:
        """Say of every leaf whether a gradient has come for it."""
        if not self.waiting and not self.wide:
            return [True] * len(self.leaves)
        grads = map(tree.grad_of, self.leaves)
        return [grad is not None or self.wide.get(i) is not None for i, grad in enumerate(grads)]

    @in_range("reduce")
    def finish(self) -> list[Tensor]:
        """Return the sums, contiguous and owned, zeros for a leaf that was not used, and let the leaves go."""
        sums = list(map(tree.grad_of, self.leaves))
        for leaf in self.leaves:
            leaf.grad = None
        for i, wide in self.wide.items():
            sums[i] = wide
        if self.waiting or self.wide:
            zeros = functools.partial(torch.zeros_like, dtype=self.dtype, memory_format=torch.contiguous_format)
            sums = [zeros(x) if grad is None else grad for x, grad in zip(self.leaves, sums, strict=True)]
        self.close()
        return sums

    def close(self) -> None:
        """Let go of the leaves."""
        self.leaves, self.wide, self.waiting, self.left = [], {}, [], None


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


def _widen(wide: dict[int, Tensor | None], i: int, dtype: torch.dtype) -> Callable[[Tensor], None]:
    """Return the hook that moves a leaf's new gradient into sum `i`; it holds no leaf, so there is no cycle."""

    def add(leaf: Tensor) -> None:
        assert leaf.grad is not None
        held = wide[i]
        grad = leaf.grad if leaf.grad.layout is torch.strided else leaf.grad.to_dense()
        wide[i] = grad.to(dtype).contiguous() if held is None else held.add_(grad)
        leaf.grad = None

    return add
