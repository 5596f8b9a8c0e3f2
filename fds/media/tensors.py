"""Tensors over memory that a medium has, and which of them live where: by the address of their storage."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor


@attrs.define(eq=False)
class Leaf:
    """What is known of a storage that a medium made."""

    medium: Any  # a Medium
    place: Any = None  # of the medium's own
    copied: tuple[Any, int] | None = None  # an event after its last copy from or to a GPU, and of which process
    checksums: dict[tuple[int, int], int] = attrs.field(factory=dict)  # of its bytes from .. to, as last written
    in_place: bool = False  # whether it is written through the mapping, which no checksum follows

    def wrote(self, start: int, end: int) -> None:
        """Forget the checksums of what lies in these bytes, which are being written."""
        for one in [(a, b) for a, b in list(self.checksums) if a < end and start < b]:
            self.checksums.pop(one, None)


leaves: dict[int, Leaf] = {}  # by the address of their storage, while it lives; empty ones have no memory

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_WRITABLE = 0x200  # PyBUF_WRITE


def leaf_of(x: Tensor) -> Leaf | None:
    """Return what is known of the storage of a tensor; None if no medium made it."""
    return leaves.get(x.untyped_storage().data_ptr()) if leaves and x.device.type == "cpu" else None


def written_in_place(x: Tensor) -> Tensor:
    """Note that a leaf is written through its memory, and return it."""
    if (leaf := leaf_of(x)) is not None:
        leaf.in_place = True
    return x


def view(address: int, nbytes: int) -> memoryview:
    """Return memory as bytes. Nothing holds it: whoever uses the view does."""
    return _view(address, nbytes, _WRITABLE)


def owned(address: int, nbytes: int, freed: Callable[..., object], *args: Any) -> memoryview:
    """Return memory as bytes; `freed(*args)` is called when the view, and all tensors over it, are gone.

    It may be called in any thread, between any two instructions.
    """
    owner = view(address, nbytes)
    weakref.finalize(owner, freed, *args).atexit = False
    return owner


def over(owner: memoryview, like: Tensor, offset: int = 0) -> Tensor:
    """Return a contiguous tensor of the shape and dtype of `like`, which is not read, over memory; a storage alone."""
    with torch.inference_mode(False):
        flat = torch.frombuffer(owner, dtype=like.dtype, count=math.prod(like.shape), offset=offset)
        return flat.resize_(like.shape)  # and not `view`, which would hold the storage once more


def nbytes_of(like: Tensor) -> int:
    """Return the bytes that a contiguous tensor of this shape and dtype takes."""
    return math.prod(like.shape) * like.element_size()
