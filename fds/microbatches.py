"""`Microbatches`: a batch that is cut already, each part with shapes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
from torch import Tensor

from fds import tree
from fds.errors import BatchError


def _parts(given: Any) -> tuple[Any, ...]:
    """Return the parts as a tuple. Raises `BatchError` for what is no sequence of one or more."""
    parts = tuple(given) if isinstance(given, list | tuple | Iterator) else ()
    if not parts:
        raise BatchError("these are no microbatches", where="fds.Microbatches", got=repr(given)[:60],
                         want="a list or tuple of microbatches, one or more")  # fmt: skip
    return parts


@tree.record
class Microbatches:
    """The microbatches of one call of the step, in order, for rows that do not make one tensor: padded each alone.

    It stands in the place of a batch, where `accumulate(n)` or a pipeline cuts no more, and has n parts.
    `fds.data.per_microbatch` lets a loader make them. Raises `BatchError` for anything but a list or tuple of some.

    >>> import torch
    >>> lengths = lambda one: [tuple(x.shape) for x in one.parts]
    >>> lengths(Microbatches((torch.zeros(2, 5), torch.zeros(2, 3))))
    [(2, 5), (2, 3)]
    """

    parts: tuple[Any, ...] = attrs.field(converter=_parts)

    def pin_memory(self) -> Microbatches:
        """Return them in page-locked memory, as torch's DataLoader asks of a batch of a class of its own."""
        return tree.map(lambda x: x.pin_memory() if isinstance(x, Tensor) else x, self)
