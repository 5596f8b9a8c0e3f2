"""`Microbatches`: a batch that is cut already, each part with shapes of its own."""

from __future__ import annotations

from typing import Any

import attrs
from torch import Tensor

from fds import tree


@tree.record
class Microbatches:
    """The microbatches of one call of the step, in order, for rows that do not make one tensor: padded each alone.

    It stands in the place of a batch, where `accumulate(n)` or a pipeline cuts no more, and has n parts.
    `fds.data.per_microbatch` lets a loader make them.

    >>> import torch
    >>> lengths = lambda one: [tuple(x.shape) for x in one.parts]
    >>> lengths(Microbatches((torch.zeros(2, 5), torch.zeros(2, 3))))
    [(2, 5), (2, 3)]
    """

    parts: tuple[Any, ...] = attrs.field(converter=tuple)

    def pin_memory(self) -> Microbatches:
        """Return them in page-locked memory, as torch's DataLoader asks of a batch of a class of its own."""
        return tree.map(lambda x: x.pin_memory() if isinstance(x, Tensor) else x, self)
