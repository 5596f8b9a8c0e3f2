"""A flat bucket of gradients: while they are written into it, and while it is reduced."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import Work
from fds.step import foreach


@attrs.define(eq=False)
class Filling:
    """A bucket that gradients are being written into, and which of its parameters have some."""

    flat: Tensor
    views: list[Tensor]
    filled: set[int] = tree.new(set)

    def add(self, which: Sequence[int], grads: list[Tensor]) -> None:
        """Write the gradients of these parameters, or add them to what is there."""
        if set(map(tree.layout_of, grads)) != {torch.strided}:
            grads = [x if x.layout is torch.strided else x.to_dense() for x in grads]
        if not self.filled and len(which) == len(self.views):  # in order, all of them
            foreach.copy_(self.views, grads)
            self.filled.update(which)
            return
        views, more = [self.views[j] for j in which], [j in self.filled for j in which]
        for write, some in ((foreach.copy_, [not one for one in more]), (foreach.add_, more)):
            if any(some):
                write(list(compress(views, some)), list(compress(grads, some)))
        self.filled.update(which)


@attrs.frozen(eq=False)
class Flight:
    """A bucket that is being reduced: what was sent, and where this rank's slice of the sum arrives."""

    held: Filling
    sent: Tensor
    own: Tensor
    work: Work
