"""Triton's interpreter with a memory: the same patches of its language, looked up once and not at every call.

It replaces the functions of `triton.language` for the time of a launch, and once more at every call of one kernel
function by another; to find them it walks over all names of four modules and classes each time, which takes a third
of the time of small kernels. What it finds is always the same.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def _builtins(owner: Any) -> tuple[tuple[str, Any], ...]:
    """Return names and functions that the interpreter replaces; called first where none of them is replaced yet."""
    return tuple((name, member) for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member))


def _patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(owner):
        if getattr(owner, name) is member:  # else it is replaced already
            interpreter._patch_attr(owner, name, member, builder, scope)


def remember() -> None:
    """Let the interpreter remember, if it is the one whose ways these are."""
    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):
        for owner in (tl, tl.core, tl.tensor, tl.math, getattr(tl.core, "tensor_descriptor_base", tl)):
            _builtins(owner)
        interpreter._patch_builtin = _patch_builtin
