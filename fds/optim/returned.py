"""Call the two functions of an optimizer and check what they return; errors name the optimizer."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fds.errors import ComposeError
from fds.optim.base import Optimizer, Segment, one_dimensional


def first_slots(
    optimizer: Optimizer, segments: Sequence[Sequence[Segment]], params: list[Tensor]
) -> dict[str, list[Tensor | None]]:
    """Return the slots that `optimizer.init` makes for these slices.

    Raises `ComposeError` for anything but `{slot: [one tensor or None per slice]}`, each of the shape and device of its
    slice, or with `phases` of one number for each of its parameters.
    """
    opt = optimizer.init(segments, params=params)
    if not isinstance(opt, dict) or not all(isinstance(slot, str) for slot in opt):
        raise _contract_error(optimizer, "init", "", in_words(opt), "{slot: [one tensor or None per slice]}")
    kind = lambda x: (x.shape, x.device) if isinstance(x, Tensor) else x
    for slot, parts in opt.items():
        listed = isinstance(parts, list | tuple) and len(parts) == len(params)
        numbers = listed and optimizer.phases is not None and all(map(_is_numbers, parts, params, segments))
        like = listed and all(x is None or kind(x) == kind(p) for x, p in zip(parts, params, strict=True))
        if not (like or numbers):
            want = f"{in_words(params)}, or None"
            raise _contract_error(optimizer, "init", f", slot {slot!r}", in_words(parts), want)
    return {slot: list(parts) for slot, parts in opt.items()}


def update(
    optimizer: Optimizer, grads: list[Tensor], opt: dict[str, list[Tensor | None]], params: list[Tensor], **rest: Any
) -> tuple[list[Tensor], dict[str, list[Tensor | None]]]:
    """Return what `optimizer.update` returns: `params` and `opt` themselves if it wrote into all their tensors.

    It gets copies of the lists, since it may put new tensors into them. Gradients may have any shape here.

    Raises `ComposeError` for anything but parameters and slots of the same shapes, dtypes and devices.
    """
    grads = list(grads) if optimizer.takes_shapes else one_dimensional(grads)
    result: Any = optimizer.update(grads, {slot: list(parts) for slot, parts in opt.items()}, list(params), **rest)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise _contract_error(optimizer, "update", "", in_words(result), "(params, opt), lists as `update` gets them")
    new, slots = result
    if slots.keys() != opt.keys():
        raise _contract_error(
            optimizer, "update", ", opt", ", ".join(map(str, slots)) or "no slots", ", ".join(opt) or "no slots"
        )
    lists = [("", new, params), *((f", slot {slot!r}", slots[slot], opt[slot]) for slot in opt)]
    in_place = [_same_tensors(optimizer, where, tensors, old) for where, tensors, old in lists]
    if all(in_place):
        return params, opt
    return list(new), {slot: list(parts) for slot, parts in slots.items()}


def _is_numbers(x: Any, slice_: Tensor, inside: Sequence[Segment]) -> bool:
    """Say whether this is one number for each parameter in a slice, or None."""
    return x is None or (isinstance(x, Tensor) and x.shape == (len(inside),) and x.device == slice_.device)


def _same_tensors(optimizer: Optimizer, where: str, tensors: Any, old: Sequence[Tensor | None]) -> bool:
    """Return whether the tensors are the old ones. Raises `ComposeError` if shape, dtype or device differ from them."""
    listed = isinstance(tensors, list | tuple) and len(tensors) == len(old)
    if listed and all(map(operator.is_, tensors, old)):
        return True
    kind = lambda x: (x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x
    if not listed or any(kind(x) != kind(y) for x, y in zip(tensors, old, strict=True)):
        raise _contract_error(optimizer, "update", where, in_words(tensors), in_words(old))
    return False


def _contract_error(optimizer: Optimizer, name: str, where: str, got: str, want: str) -> ComposeError:
    return ComposeError(
        "what fills a station did not return what it must",
        where=f"station 'optimizer', {name} of {optimizer}{where}",
        got=got[:200],
        want=want[:200],
    )


def in_words(value: Any) -> str:
    """Describe a value in an error: a tensor by its shape, dtype and device, a list by its length."""
    if isinstance(value, list | tuple):
        return f"{len(value)} lea{'f' if len(value) == 1 else 'ves'}: " + ", ".join(map(in_words, value[:6]))
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype} on {value.device}"
    return f"{type(value).__name__} {value!r}"[:60]
