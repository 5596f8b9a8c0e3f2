"""What the two functions of an optimizer return: errors that name the optimizer where it is not what it must be."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fds.errors import ComposeError
from fds.optim.base import Optimizer, Segment


def first_slots(
    optimizer: Optimizer, segments: Sequence[Sequence[Segment]], params: list[Tensor]
) -> dict[str, list[Tensor | None]]:
    """Return what `optimizer.init` makes for these slices.

    Raises `ComposeError` for anything but `{slot: [one tensor or None per slice]}`, each of the shape and device of its
    slice.
    """
    found = optimizer.init(segments, params=params)
    if not isinstance(found, dict) or not all(isinstance(slot, str) for slot in found):
        raise _broken(optimizer, "init", "", in_words(found), "{slot: [one tensor or None per slice]}")
    kind = lambda x: (x.shape, x.device) if isinstance(x, Tensor) else x
    for slot, parts in found.items():
        listed = isinstance(parts, list | tuple) and len(parts) == len(params)
        if not listed or any(x is not None and kind(x) != kind(p) for x, p in zip(parts, params, strict=True)):
            raise _broken(optimizer, "init", f", slot {slot!r}", in_words(parts), f"{in_words(params)}, or None")
    return {slot: list(parts) for slot, parts in found.items()}


def update(
    optimizer: Optimizer, grads: list[Tensor], opt: dict[str, list], params: list[Tensor], **rest: Any
) -> tuple[list[Tensor], dict[str, list]]:
    """Return what `optimizer.update` returns: `params` and `opt` themselves where it wrote into all their tensors.

    It is given lists of its own, since it may put new tensors into them.

    Raises `ComposeError` for anything but parameters and slots of the same shapes, dtypes and devices.
    """
    found: Any = optimizer.update(grads, {slot: list(parts) for slot, parts in opt.items()}, list(params), **rest)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        raise _broken(optimizer, "update", "", in_words(found), "(params, opt), lists as `update` was given them")
    new, slots = found
    if slots.keys() != opt.keys():
        raise _broken(optimizer, "update", ", opt", ", ".join(map(str, slots)) or "no slots",
                      ", ".join(opt) or "no slots")  # fmt: skip
    written = [_alike(optimizer, place, given, known)
               for place, given, known in [("", new, params), *((f", slot {s!r}", slots[s], opt[s]) for s in opt)]]
    if all(written):
        return params, opt
    return list(new), {slot: list(parts) for slot, parts in slots.items()}


def _alike(optimizer: Optimizer, place: str, found: Any, known: Sequence[Tensor | None]) -> bool:
    """Return whether the tensors are the very ones that are known. Raises `ComposeError` unless they are like them."""
    listed = isinstance(found, list | tuple) and len(found) == len(known)
    if listed and all(map(operator.is_, found, known)):
        return True
    kind = lambda x: (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x
    if not listed or any(kind(x) != kind(y) for x, y in zip(found, known, strict=True)):
        raise _broken(optimizer, "update", place, in_words(found), in_words(known))
    return False


def _broken(optimizer: Optimizer, name: str, place: str, got: str, want: str) -> ComposeError:
    return ComposeError(
        "what fills a station did not return what it must", where=f"station 'optimizer', {name} of {optimizer}{place}",
        got=got[:200], want=want[:200],
    )  # fmt: skip


def in_words(found: Any) -> str:
    """Return what something is, for an error: of a tensor the shape, the dtype and the device, of lists the number."""
    if isinstance(found, list | tuple):
        return f"{len(found)} leaves: " + ", ".join(map(in_words, found[:6]))
    if isinstance(found, Tensor):
        return f"{tuple(found.shape)} {found.dtype} on {found.device}"
    return f"{type(found).__name__} {found!r}"[:60]
