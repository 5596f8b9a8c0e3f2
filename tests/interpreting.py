"""Triton's interpreter with a memory: the same patches of its language, looked up once and not at every call.

It replaces the functions of `triton.language` for the time of a launch, and once more at every call of one kernel
function by another; to find them it walks over all names of four modules and classes each time, which takes a third
of the time of small kernels. What it finds is always the same, and what is replaced already need not be replaced again.
It also makes a table of 20 dtypes anew for each number, and for each block the type of it and the constants of its
shape, of which a kernel has a few; with them small kernels took half as long again.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
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


@functools.cache
def _languages(function: Any) -> tuple[Any, ...]:
    """Return the modules of the language that a kernel function sees."""
    return tuple(x for x in function.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core))


def _is_patched(language: Any) -> bool:
    name, member = _builtins(language)[0]
    return getattr(language, name) is not member


def _patch_once(patch: Any, function: Any) -> Any:
    """Patch the language as `patch` does, unless that is done already: a kernel function calls this one."""
    languages = _languages(function)
    if languages and all(map(_is_patched, languages)):
        return interpreter._LangPatchScope()
    return patch(function)


def _np_dtype(of_a_scalar: Any, kind: Any) -> Any:
    """Return what NumPy calls the dtype of a scalar, a block or a pointer; only scalars can be hashed."""
    scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else of_a_scalar(scalar)


def _block_type_once(init: Any) -> Any:
    """Make the type of blocks of a shape once: `init` checks the shape and spells its name."""
    made: dict[Any, dict[str, Any]] = {}

    @functools.wraps(init)
    def remembered(self: Any, element_ty: Any, shape: Any) -> None:
        if isinstance(element_ty, tl.pointer_type) or not all(type(n) is int for n in shape):
            init(self, element_ty, shape)
            return
        key = element_ty, *shape
        if key not in made:
            init(self, element_ty, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    return remembered


def _tensor_once(init: Any) -> Any:
    """Make the constants of a shape once, of which a tensor has one for each dimension, and one for its elements."""
    made: dict[Any, tuple[Any, Any]] = {}

    @functools.wraps(init)
    def remembered(self: Any, handle: Any, type: Any) -> None:
        shape = (*type.shape,) if type.is_block() else ()
        if shape not in made:
            init(self, handle, type)
            made[shape] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = made[shape]

    return remembered


def _names(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def remember() -> None:
    """Let the interpreter remember, if it is the one whose ways these are."""
    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):
        for owner in (tl, tl.core, tl.tensor, tl.math, getattr(tl.core, "tensor_descriptor_base", tl)):
            _builtins(owner)
        interpreter._patch_builtin = _patch_builtin
        if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
            interpreter._patch_lang = functools.partial(_patch_once, interpreter._patch_lang)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = functools.partial(_np_dtype, functools.cache(interpreter._get_np_dtype))
    if _names(tl.block_type.__init__) == ("self", "element_ty", "shape"):
        tl.block_type.__init__ = _block_type_once(tl.block_type.__init__)
    if set(vars(tl.tensor(None, tl.int32))) == {"handle", "type", "dtype", "shape", "numel"}:
        tl.tensor.__init__ = _tensor_once(tl.tensor.__init__)
