"""The memory that captured work reads batches from, and which batches fit into it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.step import foreach
from fds.step.batch import Whole
from fds.step.checks import capture

MOST_KINDS = 16  # of batches: each has a graph
_VALUES = (int, float, bool, str, bytes, complex, type(None), torch.dtype)  # of which a graph may hold what they are
_PLAIN = (Tensor, torch.nn.Parameter)


@attrs.frozen(eq=False)
class Kind:
    """A batch taken apart: its tensors, and what must be equal for another one to be read from the same memory."""

    key: Hashable
    tensors: list[Tensor]
    build: Callable[[list[Tensor]], Any]

    @classmethod
    def of(cls, batch: Any, device: torch.device) -> Kind:
        """Take a batch apart. Raises `BatchError` for leaves other than dense tensors on the device, and values."""
        leaves, spec = tree.parts(batch)
        tensors: list[Tensor] = []
        keys: list[Hashable] = []
        builds: list[Callable[[list[Tensor]], Any]] = []
        for i, x in enumerate(leaves):
            if isinstance(x, Whole):
                inside = cls.of(x.value, device)
                key, build = inside.key, _whole(len(tensors), inside)
                tensors += inside.tensors
            elif type(x) in _PLAIN and x.layout is torch.strided and x.device == device:
                key, build = (x.shape, x.stride(), x.dtype, x.requires_grad), _tensor(len(tensors))
                tensors.append(x)
            elif isinstance(x, _VALUES):
                key, build = (type(x), repr(x) if isinstance(x, float | complex) else x), _value(x)  # -0.0, nan
            else:
                raise capture.leaf_of_batch(list(tree.paths(batch))[i], x, device)
            keys.append(key)
            builds.append(build)
        return cls((spec, *keys), tensors, lambda given: spec.unflatten([build(given) for build in builds]))


@attrs.frozen(eq=False)
class BatchMemory:
    """Memory like the tensors of a batch, of the same strides, and the batch that is in it."""

    tensors: list[Tensor]
    batch: Any

    @classmethod
    def like(cls, kind: Kind) -> BatchMemory:
        """Return memory for batches of a kind."""
        tensors = [torch.empty_like(x, requires_grad=x.requires_grad) for x in kind.tensors]
        return cls(tensors, kind.build(tensors))

    def take(self, kind: Kind) -> None:
        """Copy a batch here."""
        if self.tensors:
            foreach.copy_([x.detach() for x in self.tensors], [x.detach() for x in kind.tensors])

    @property
    def num_bytes(self) -> int:
        """The bytes of it."""
        return sum(x.nbytes for x in self.tensors)


def _tensor(at: int) -> Callable[[list[Tensor]], Any]:
    return lambda given: given[at]


def _value(x: Any) -> Callable[[list[Tensor]], Any]:
    return lambda given: x


def _whole(at: int, inside: Kind) -> Callable[[list[Tensor]], Any]:
    return lambda given: Whole(inside.build(given[at : at + len(inside.tensors)]))
