"""`Microbatches`: a batch that is already split, whose microbatches may differ in shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
from torch import Tensor

from fds import tree
from fds.errors import BatchError


def _parts(sequence: Any) -> tuple[Any, ...]:
    """Return the microbatches as a tuple. Raises `BatchError` unless they are a sequence of one or more."""
    parts = tuple(sequence) if isinstance(sequence, list | tuple | Iterator) else ()
    if not parts:
        raise BatchError(
            "not a sequence of microbatches",
            where="fds.Microbatches",
            got=repr(sequence)[:60],
            want="a list or tuple of microbatches, one or more",
        )
    return parts


@tree.record
class Microbatches:
    """The microbatches of one call of the step, in order, if they do not fit one tensor: each padded by itself.

    It is passed in place of a batch. `accumulate(n)` or a pipeline does not split it further; it must have n parts.
    `fds.data.per_microbatch` makes a loader return them. Raises `BatchError` for anything else.

    >>> import torch
    >>> lengths = lambda one: [tuple(x.shape) for x in one.parts]
    >>> lengths(Microbatches((torch.zeros(2, 5), torch.zeros(2, 3))))
    [(2, 5), (2, 3)]
    """

    parts: tuple[Any, ...] = attrs.field(converter=_parts)

    def pin_memory(self) -> Microbatches:
        """Return a copy in page-locked memory; torch's DataLoader calls this for custom batch types."""
        return tree.map(lambda x: x.pin_memory() if isinstance(x, Tensor) else x, self)
