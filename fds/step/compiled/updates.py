"""Torch's fused updates as operators that compilers can follow.

Those of torch 2.13 have no meta kernels, or write to lists that may be empty, which its functionalization refuses. The
operators here have the same signatures, call the same functions, and are understood by `auto_functionalized`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

NAMES = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_PACKETS = {getattr(torch.ops.aten, name) for name in NAMES}


def traceable(op: Any) -> Any:
    """Return the operator to record in the place of one of torch's: itself, if it is no fused update."""
    return _ours(op) if op.overloadpacket in _PACKETS else op


@functools.cache
def _library() -> Any:
    return torch.library.Library("fds", "FRAGMENT")


def _without_result(*args: Any, **kwargs: Any) -> None:
    """Do nothing: of tensors without data, all that an update does."""


@functools.cache
def _ours(op: Any) -> Any:
    """Define the operator, for the whole process; once."""
    name, overload = op.overloadpacket.__name__.strip("_"), op._overloadname
    own = name if overload == "default" else f"{name}_{overload}"
    schema = str(op._schema).partition("(")[2]
    _library().define(f"{own}({schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _library().impl(own, op, "CompositeExplicitAutograd")
    library: Any = torch.library  # which torch leaves without types
    library.register_fake(f"fds::{own}", _without_result, lib=_library())
    return getattr(torch.ops.fds, own).default
