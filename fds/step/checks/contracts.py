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
from fds.errors import ComposeError, StateError, is_a
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


def sent(work: Any, transport: Transport, leg: str) -> Work:
    """Return what a leg of a transport returned. Raises `ComposeError` for nothing to wait for."""
    if not hasattr(work, "wait"):
        want = f"{leg}(axis, ...) -> Work: what a started collective returns, or an fds.step.Pending(work, then)"
        raise _broken("gather" if leg == "gather" else "reduce", transport, in_words(work), want)
    return work


def batch(new: Any, old: Any, map_: Any) -> Any:
    """Return what a batch map returned. Raises `ComposeError` for nothing, unless it was given nothing."""
    if new is None and old is not None:
        raise _broken("batch", map_, "None", "the batch")
    return new


def written_rows(map_: Any, where: str) -> ComposeError:
    """Return the error of a batch map that writes into the rows that it is given."""
    return ComposeError(
        "what fills a station writes over the batch that it is given",
        where=f"station 'batch', {_called(map_)}",
        got=f"an in-place operation on {where}",
        want="(batch, call) -> batch, a new one where it differs",
        hint="look for methods that end in _; what was written stays",
    )


def viewed(x: Any, view: Any) -> Tensor:
    """Return what a view returned. Raises `ComposeError` for anything but a tensor."""
    if not isinstance(x, Tensor):
        raise _broken("view", view, in_words(x), "a tensor in the place of the parameter")
    return x


def names_read(names: Any, name: str) -> Sequence[str]:
    """Return the names that a view of one parameter reads. Raises `ComposeError` for anything else."""
    if not tree.is_sequence(names) or not all(is_a(other, str) for other in names):
        raise ComposeError(
            "a view reads what is no list of names",
            where=f"station 'view', reads of {name}",
            got=repr(names)[:80],
            want="a list or tuple of names of parameters, which may be empty",
        )
    return names


def read_by_view(leaves: Mapping[str, Tensor], other: str, name: str) -> Tensor:
    """Return a parameter that the view of another reads. Raises `ComposeError` for one that is not there."""
    if other not in leaves:
        raise ComposeError(
            "a view reads a parameter that is not there",
            where=f"station 'view', reads of {name}",
            got=repr(other),
            want=f"parameters that this rank has: {', '.join(leaves)[:120]}",
            hint="the stages of a pipeline have the parameters of their layers",
        )
    return leaves[other]


def first_slot(slot: Any, name: str, make: Any) -> Any:
    """Return a slot as a filler made it. Raises `ComposeError` for anything but a tree of tensors."""
    for path, x in tree.paths(slot).items():
        if not isinstance(x, Tensor):
            at = ".".join(filter(None, (name, path)))
            raise _broken("memory", make, f"{at}: {in_words(x)}", "a tree of tensors, which a state can hold")
    return slot


def named_slot(slot: Any, name: str, make: Any, among: Iterable[str] | None = None) -> None:
    """Raise `ComposeError` for a slot that is anything but a dict of tensors by strings, or by those `among` some."""
    if not (tree.is_dict(slot) and all(isinstance(k, str) and isinstance(x, Tensor) for k, x in slot.items())):
        raise _broken("memory", make, f"{name}: {in_words(slot)}", "a dict: name -> tensor")
    other = next((k for k in slot if among is not None and k not in among), None)
    if other is not None:
        raise _broken("memory", make, f"{name}.{other}", "a dict: name of a trained parameter -> tensor")


def merged_slot(slot: Any, name: str, make: Any, device: torch.device) -> None:
    """Raise `ComposeError` for a slot of which entries cannot be merged with what is noted on a device."""
    for path, x in tree.paths(slot).items():
        elsewhere = x.device.type != device.type != "meta"
        if x.dtype not in _MERGED or elsewhere:
            at, want = ".".join(filter(None, (name, path))), f"floating or signed integer numbers on {device}"
            raise _broken("memory", make, f"{at}: {x.dtype} on {x.device}", want)


def reported(scale: Any, slots: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Return what a scale, where there is one, reports. Raises `ComposeError` for anything but a dict of tensors."""
    if scale is None:
        return {}
    metrics = scale.metrics(slots, device)
    if not (tree.is_dict(metrics) and all(isinstance(x, Tensor) for x in metrics.values())):
        raise _broken("scale", scale, in_words(metrics), "metrics(slots, device): a dict of 0-d tensors")
    return metrics


def gradients(new: Any, old: Gradients, map_: Any) -> Gradients:
    """Return what a gradient map returned, knowing where it lies. Raises `ComposeError` for other leaves."""
    if not isinstance(new, Gradients):
        raise _broken("condition", map_, in_words(new), "Gradients(leaves, scale), of as many leaves as it was given")
    for name, x in (("scale", new.scale), ("norm", new.norm)):
        if not (x is None or (is_a(x, Tensor) and x.dim() == 0 and x.is_floating_point())):
            raise _broken(
                "condition",
                map_,
                f"{name}: {in_words(x)}",
                f"{name}: None or a floating-point () tensor, as `grads.{name}` is",
            )
    if new.leaves is not old.leaves:
        leaves = _alike("condition", map_, new.leaves, old.leaves)
        new = attrs.evolve(new, leaves=[x.contiguous() for x in leaves])
    return attrs.evolve(
        new, segments=old.segments, axes=old.axes, norm_of=old.norm_of, counted=old.counted, landing=old.landing
    )


def remembered(slot: Any, old: Any, filler: Any, station: str = "after") -> Any:
    """Return a slot as a filler of `after`, or a memory, returned it. Raises `ComposeError` for another structure."""
    if slot is old:
        return slot
    (leaves, spec), (old_leaves, old_spec) = tree.parts(slot), tree.parts(old)
    if spec != old_spec:
        raise _broken(station, filler, in_words(slot), f"the slot {filler.slot!r}, of the structure that it has")
    _alike(station, filler, leaves, old_leaves, dtypes=True)
    return slot


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


class NoEntryError(StateError, KeyError):
    """A `KeyError` too, so that `in` and `get` work."""

    __str__ = BaseException.__str__

    @classmethod
    def of(cls, key: object) -> NoEntryError:
        """Return the error of a state that lacks a slot, or an entry in one, which a filler reads."""
        return cls(
            "the state is another composition's",
            where="call.slots",
            got=f"no {key!r}"[:80],
            want="the slots of this step",
            hint="make the state with the init of this step, or carry it over: step.init(other_step.params(state))",
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


def resting(where: str) -> ComposeError:
    """Return the error of a note of a slot that does not change in this call."""
    return ComposeError(
        "this slot does not change in this call, and nothing is noted of it",
        where=where,
        got="a call in which the `when` of its Memory is False",
        want="call.note where call.is_due(slot)",
    )


def keyless(filler: Any) -> ComposeError:
    """Return the error of a filler that says that it draws nothing and asks for a random key."""
    return ComposeError(
        "a filler that says that it draws nothing asks for a random key",
        where=written(filler)[:120],
        got="draws = False, and call.key",
        want="one of the two",
        hint="what draws is drawn alike for tied parameters, so it leaves `draws` out",
    )


def microbatches(parts: Any, split: Any) -> list[Any]:
    """Return what a split returned. Raises `ComposeError` for anything but a list of some."""
    if not (tree.is_sequence(parts) and parts):
        raise _broken("split", split, in_words(parts), "a list of microbatches, one or more")
    return list(parts)


def context(manager: Any, make: Any, station: str = "context") -> AbstractContextManager[object]:
    """Return the context that a filler made. Raises `ComposeError` where it is none."""
    if not has(type(manager), "__enter__", "__exit__"):
        raise _broken(station, make, in_words(manager), "a context manager")
    return manager


def scalar(factor: Any, scale: Any) -> Tensor:
    """Return the scale that a filler returned. Raises `ComposeError` for anything but a floating 0-d tensor."""
    if not (isinstance(factor, Tensor) and factor.dim() == 0 and factor.is_floating_point()):
        raise _broken("scale", scale, in_words(factor), "a 0-d float64 tensor on the device")
    return factor


def _alike(station: str, filler: Any, leaves: Any, likes: Sequence[Tensor], *, dtypes: bool = False) -> list[Tensor]:
    def what(x: object) -> object:
        return (x.shape, x.device, x.dtype if dtypes else None) if isinstance(x, Tensor) else type(x)

    if not (tree.is_sequence(leaves) and list(map(what, leaves)) == list(map(what, likes))):
        raise _broken(station, filler, in_words(leaves), in_words(likes))
    return list(leaves)


def _broken(station: str, filler: Any, got: str, want: str) -> ComposeError:
    return ComposeError(
        "what fills a station did not return what it must",
        where=f"station {station!r}, {_called(filler)}",
        got=got[:200],
        want=want[:200],
    )


def _called(filler: Any) -> str:
    """Return how to call a filler in a message."""
    text = repr(filler)
    return getattr(filler, "__name__", None) or (type(filler).__name__ if text.startswith("<") else text[:60])


def tie(
    share: Callable[[str, Tensor], None],
    filler: Any,
    leaves: Sequence[Tensor | None],
    segments: Sequence[Sequence[Segment]],
) -> None:
    """Make the leaves of tied parameters equal again on all their ranks, where the `filler` may draw.

    `share(name, leaf)` gives a leaf the values that it has on the first rank that holds the parameter.
    """
    if random.draws(filler):
        for leaf, inside in zip(leaves, segments, strict=True):
            if leaf is not None and inside:
                share(inside[0].name, leaf)
