"""What fillers must return: errors that name the filler, before what it returned is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import random, tree
from fds.collectives import Work
from fds.errors import ComposeError, is_a
from fds.layout import Segment
from fds.optim.returned import in_words
from fds.step.checks.forms import has, written
from fds.step.gradients import Gradients
from fds.step.sharding.transport import Transport

_MERGED = {
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
}


def sent(found: Any, transport: Transport, leg: str) -> Work:
    """Return what a leg of a transport returned. Raises `ComposeError` for nothing to wait for."""
    if not hasattr(found, "wait"):
        want = f"{leg}(axis, ...) -> Work: what a started collective returns, or an fds.step.Pending(work, then)"
        raise _broken("gather" if leg == "gather" else "reduce", transport, in_words(found), want)
    return found


def batch(found: Any, given: Any, one: Any) -> Any:
    """Return what a batch map returned. Raises `ComposeError` for nothing, unless it was given nothing."""
    if found is None and given is not None:
        raise _broken("batch", one, "None", "the batch")
    return found


def written_rows(one: Any, where: str) -> ComposeError:
    """Return the error of a batch map that writes into the rows that it is given."""
    return ComposeError(
        "what fills a station writes over the batch that it is given",
        where=f"station 'batch', {_called(one)}",
        got=f"an in-place operation on {where}",
        want="(batch, call) -> batch, a new one where it differs",
        hint="look for methods that end in _; what was written stays",
    )


def viewed(found: Any, view: Any) -> Tensor:
    """Return what a view returned. Raises `ComposeError` for anything but a tensor."""
    if not isinstance(found, Tensor):
        raise _broken("view", view, in_words(found), "a tensor in the place of the parameter")
    return found


def read_by_view(leaves: Mapping[str, Tensor], other: str, name: str) -> Tensor:
    """Return a parameter that the view of another reads. Raises `ComposeError` for one that is not there."""
    if other == name or other not in leaves:
        raise ComposeError(
            "a view reads a parameter that is not there",
            where=f"station 'view', reads of {name}",
            got=f"{other!r}{' itself' * (other == name)}",
            want=f"other parameters that this rank has: {', '.join(leaves)[:120]}",
            hint="the stages of a pipeline have the parameters of their layers",
        )
    return leaves[other]


def first_slot(found: Any, name: str, make: Any) -> Any:
    """Return a slot as a filler made it. Raises `ComposeError` for anything but a tree of tensors."""
    for path, x in tree.paths(found).items():
        if not isinstance(x, Tensor):
            at = ".".join(filter(None, (name, path)))
            raise _broken("memory", make, f"{at}: {in_words(x)}", "a tree of tensors, which a state can hold")
    return found


def named_slot(found: Any, name: str, make: Any, among: Iterable[str] | None = None) -> None:
    """Raise `ComposeError` for a slot that is anything but a dict of tensors by strings, or by those `among` some."""
    if not (tree.is_dict(found) and all(isinstance(k, str) and isinstance(x, Tensor) for k, x in found.items())):
        raise _broken("memory", make, f"{name}: {in_words(found)}", "a dict: name -> tensor")
    other = next((k for k in found if among is not None and k not in among), None)
    if other is not None:
        raise _broken("memory", make, f"{name}.{other}", "a dict: name of a trained parameter -> tensor")


def merged_slot(found: Any, name: str, make: Any, device: torch.device) -> None:
    """Raise `ComposeError` for a slot of which entries cannot be merged with what is noted on a device."""
    for path, x in tree.paths(found).items():
        elsewhere = x.device.type != device.type != "meta"
        if x.dtype not in _MERGED or elsewhere:
            at, want = ".".join(filter(None, (name, path))), f"floating or signed integer numbers on {device}"
            raise _broken("memory", make, f"{at}: {x.dtype} on {x.device}", want)


def reported(scale: Any, slots: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Return what a scale, where there is one, reports. Raises `ComposeError` for anything but a dict of tensors."""
    if scale is None:
        return {}
    found = scale.metrics(slots, device)
    if not (tree.is_dict(found) and all(isinstance(x, Tensor) for x in found.values())):
        raise _broken("scale", scale, in_words(found), "metrics(slots, device): a dict of 0-d tensors")
    return found


def gradients(found: Any, known: Gradients, one: Any) -> Gradients:
    """Return what a gradient map returned, knowing where it lies. Raises `ComposeError` for other leaves."""
    if not isinstance(found, Gradients):
        raise _broken("condition", one, in_words(found), "Gradients(leaves, scale), of as many leaves as it was given")
    for name, x in (("scale", found.scale), ("norm", found.norm)):
        if not (x is None or (is_a(x, Tensor) and x.dim() == 0 and x.is_floating_point())):
            raise _broken(
                "condition",
                one,
                f"{name}: {in_words(x)}",
                f"{name}: None or a floating-point () tensor, as `grads.{name}` is",
            )
    if found.leaves is not known.leaves:
        leaves = _alike("condition", one, found.leaves, known.leaves)
        found = attrs.evolve(found, leaves=[x.contiguous() for x in leaves])
    return attrs.evolve(
        found,
        segments=known.segments,
        axes=known.axes,
        norm_of=known.norm_of,
        counted=known.counted,
        landing=known.landing,
    )


def remembered(found: Any, given: Any, one: Any, station: str = "after") -> Any:
    """Return a slot as a filler of `after`, or a memory, returned it. Raises `ComposeError` for another structure."""
    if found is given:
        return found
    (new, spec), (old, old_spec) = tree.parts(found), tree.parts(given)
    if spec != old_spec:
        raise _broken(station, one, in_words(found), f"the slot {one.slot!r}, of the structure that it has")
    _alike(station, one, new, old, dtypes=True)
    return found


def overwritten(memory: Any) -> ComposeError:
    """Return the error of a rule that writes into the slot of the old state."""
    return ComposeError(
        "what fills a station writes over the state",
        where=f"station 'memory', {memory}",
        got="accept wrote into the slot",
        want="accept: (slot, noted, call) -> a new slot",
    )


def undecided() -> ComposeError:
    """Return the error of a filler that asks for what is not decided when it runs."""
    return ComposeError(
        "nobody has decided yet whether a gradient is not finite",
        where="call.overflow",
        got="a filler that runs before, or after, the rules of memories",
        want="a rule of Memory(..., on_skip='run'), and a Measure(norm=True, skips=True)",
    )


def written_slot() -> ComposeError:
    """Return the error of a filler that writes into the slots that a call shows."""
    return ComposeError(
        "a filler writes into the slots of a state",
        where="call.slots",
        got="an entry that is set or deleted",
        want="call.slots that is only read",
        hint="a slot changes by the notes of fillers and its Memory's merge and "
        "accept, or by a filler of `after`, which is given it",
    )


def unnoted(where: str) -> ComposeError:
    """Return the error of a note where nothing may be noted."""
    return ComposeError(
        "nothing may be noted here",
        where=where,
        got="no Memory with merge=, another station, or a call that is over",
        want="call.note in a filler of `batch`, `view`, `context` or `layer`, or in a call that a layer map returned, "
        "while it runs; or in one of `condition` with an attribute notes = True",
        hint="what follows an update writes its slot itself",
    )


def keyless(one: Any) -> ComposeError:
    """Return the error of a filler that says that it draws nothing and asks for a random key."""
    return ComposeError(
        "a filler that says that it draws nothing asks for a random key",
        where=written(one)[:120],
        got="draws = False, and call.key",
        want="one of the two",
        hint="what draws is drawn alike for tied parameters, so it leaves `draws` out",
    )


def microbatches(found: Any, split: Any) -> list[Any]:
    """Return what a split returned. Raises `ComposeError` for anything but a list of some."""
    if not (tree.is_sequence(found) and found):
        raise _broken("split", split, in_words(found), "a list of microbatches, one or more")
    return list(found)


def context(found: Any, make: Any, station: str = "context") -> AbstractContextManager[object]:
    """Return the context that a filler made. Raises `ComposeError` where it is none."""
    if not has(type(found), "__enter__", "__exit__"):
        raise _broken(station, make, in_words(found), "a context manager")
    return found


def scalar(found: Any, scale: Any) -> Tensor:
    """Return the scale that a filler returned. Raises `ComposeError` for anything but a floating 0-d tensor."""
    if not (isinstance(found, Tensor) and found.dim() == 0 and found.is_floating_point()):
        raise _broken("scale", scale, in_words(found), "a 0-d float64 tensor on the device")
    return found


def _alike(station: str, one: Any, found: Any, given: Sequence[Tensor], *, dtypes: bool = False) -> list[Tensor]:
    def what(x: object) -> object:
        return (x.shape, x.device, x.dtype if dtypes else None) if isinstance(x, Tensor) else type(x)

    if not (tree.is_sequence(found) and list(map(what, found)) == list(map(what, given))):
        raise _broken(station, one, in_words(found), in_words(given))
    return list(found)


def _broken(station: str, one: Any, got: str, want: str) -> ComposeError:
    return ComposeError(
        "what fills a station did not return what it must",
        where=f"station {station!r}, {_called(one)}",
        got=got[:200],
        want=want[:200],
    )


def _called(one: Any) -> str:
    """Return how to call a filler in a message."""
    text = repr(one)
    return getattr(one, "__name__", None) or (type(one).__name__ if text.startswith("<") else text[:60])


def tie(
    share: Callable[[str, Tensor], None],
    one: Any,
    leaves: Sequence[Tensor | None],
    segments: Sequence[Sequence[Segment]],
) -> None:
    """Make the leaves of tied parameters equal again on all their ranks, where the filler `one` may draw.

    `share(name, leaf)` gives a leaf the values that it has on the first rank that holds the parameter.
    """
    if random.draws(one):
        for leaf, inside in zip(leaves, segments, strict=True):
            if leaf is not None and inside:
                share(inside[0].name, leaf)
