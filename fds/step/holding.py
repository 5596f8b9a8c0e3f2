"""The station `hold`: what a state has in the place of a parameter, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
from torch import Tensor

from fds.layout import Leaf
from fds.step.call import Call
from fds.step.checks import contracts
from fds.step.structure import Gathers


class Hold(Protocol):
    """An entry of the station; both methods take `meta` tensors too."""

    def encode(self, x: Tensor, leaf: Leaf) -> Tensor:
        """Return what a state holds of a parameter that `step.init` is given."""
        ...

    def decode(self, x: Tensor, leaf: Leaf) -> Tensor:
        """Return the parameter."""
        ...


def encoded(hold: Sequence[Hold], x: Tensor, leaf: Leaf) -> Tensor:
    """Return what a state holds of a parameter."""
    for one in hold:
        x = contracts.viewed(one.encode(x, leaf), one, "hold")
    return x


def decoded(hold: Sequence[Hold], x: Tensor, leaf: Leaf) -> Tensor:
    """Return a parameter, given what a state holds of it."""
    for one in reversed(hold):
        x = contracts.viewed(one.decode(x, leaf), one, "hold")
    return x


@attrs.frozen(eq=False)
class FromHeld:
    """The first view of a parameter: it decodes, into the dtype in which the loss sees the parameter."""

    hold: Sequence[Hold]
    gather: Gathers

    def __call__(self, x: Tensor, leaf: Leaf, call: Call) -> Tensor:
        """Return a parameter, given what a state holds of it."""
        x = decoded(self.hold, x, leaf)
        return x.to(self.gather.dtype_of(leaf.name, x.dtype))
