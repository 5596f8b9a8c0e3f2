"""Whether the current code is being differentiated, by fds or by a transform of `torch.func`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_differentiated: ContextVar[bool] = ContextVar("fds_differentiated", default=False)
inside = _differentiated.get
# private: torch has no public function that tells the tensors of its transforms from others, not even by their type
_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def differentiated() -> Iterator[None]:
    """Run code that will be differentiated: a gradient without a graph would be a wrong constant in it."""
    token = _differentiated.set(True)
    try:
        yield
    finally:
        _differentiated.reset(token)


def is_differentiated() -> bool:
    """Return whether this is the inside of a function that is being differentiated, with gradients enabled."""
    return _differentiated.get() and torch.is_grad_enabled()


def in_torch_func() -> bool:
    """Return whether this is the inside of a function that `torch.func` transforms."""
    return torch._C._are_functorch_transforms_active()  # private: torch has no public function for it


def is_wrapped(x: Tensor) -> bool:
    """Return whether a tensor stands for one sample, or for a value and its tangent, in a transform of `torch.func`."""
    return _functorch.is_functorch_wrapped_tensor(x)


def in_backward() -> bool:
    """Return whether this thread runs a backward, or what it computes again."""
    return torch._C._current_graph_task_id() != -1  # private; torch has no public function that says so
