"""Filling stations: what a transform does to a step, each single station, field and slot once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs

from fds import tree
from fds.errors import ComposeError, did_you_mean, nearest
from fds.optim import Optimizer
from fds.step.checks import forms
from fds.step.checks.forms import is_encoding
from fds.step.gradients import Measure
from fds.step.memory import Memory
from fds.step.one_rank import FirstCallCompared
from fds.step.sharding.kept import SLOT, nothing_kept
from fds.step.sharding.reduce import memories
from fds.step.sharding.shard import Shard
from fds.step.topology import Dimension, Dimensions

if TYPE_CHECKING:
    from fds.step.program import Step


_GONE = {  # stations that were, and what to write
    "commit": "measure=Measure(norm=True, skips=True); Memory(..., accept=rule, on_skip='run') is for who counts skips",
    "hold": "view=one that has encode(x, leaf) too: it is called, (x, leaf, call), with what a state holds",
    "synchronize": "after=an object whose `writes` is 'params'",
    "draw": "context=an object with around_layer(layer, given)",
}


def fill(step: Step, *, hint: str = "", instead: str | None = "", **stations: Any) -> Step:
    """Return `step` with stations filled by the transform whose turn it is.

    Tuple stations are appended to; of `gather` and `reduce` a dict fills the fields that it names; `memory` takes one
    `Memory`, and `slots={name: init}` is short for one that lies like the parameters. What somebody filled before,
    station, field or slot, is a `ComposeError`, into which `hint` goes, and `instead` of this transform's own text
    (None: nothing).
    """
    by, owners = step.composing.position, dict(step.composing.owners)
    changes: dict[str, Any] = {}
    for name, value in itertools.chain(stations.items(), _implied(stations)):
        current = _station(step, name)
        by_field = value if tree.is_dict(value) else None  # of the fields of a station
        if by_field is None or name in ("memory", "slots"):
            forms.form(name, value, current)
        if name in ("memory", "slots"):
            made = _memories(value)
            for slot in made:
                if (key := f"slots.{slot}") in owners:
                    raise conflict(step, f"the slot {slot!r}", owners[key], hint, instead=instead)
                owners[key] = by
            changes["memory"] = {**changes.get("memory", step.memory), **made}
        elif isinstance(current, tuple):
            if (once := _stands_once(value)) is not None:
                key, what = once
                if key in owners:
                    drop = by if instead is None else owners[key]
                    raise conflict(step, what, owners[key], hint, drop=drop, instead=instead)
                owners[key] = by
            changes[name] = (*current, value)
        else:
            fields = _fields(current) if by_field is None else by_field
            keys = [f"{name}.{field}" for field in fields] + [name] * (by_field is None)
            taken = next((key for key in keys if key in owners), None)
            if taken is not None:
                drop = by if instead is None else owners[taken]
                raise conflict(step, f"the station {name!r}", owners[taken], hint, drop=drop, instead=instead)
            changes[name] = value if by_field is None else _evolved(name, current, by_field)
            owners.update(dict.fromkeys(keys, by))
    if changes.keys() & {"topology", "view"}:
        encodings = [view for view in changes.get("view", step.view) if is_encoding(view)]
        changes["dimensions"] = Dimensions.of(changes.get("topology", step.topology)).holding(encodings)
    return attrs.evolve(step, composing=attrs.evolve(step.composing, owners=owners), **changes)


def first_call_compared(step: Step) -> Step:
    """Return the step, whose first call is compared with one rank."""
    return fill(step, run=FirstCallCompared(), instead=None, hint="one verify=True compares all of a step")


def _implied(stations: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the station and the filler that others call for: what keeps errors of messages has slots for them."""
    reduce = stations.get("reduce")
    transport = reduce.get("transport") if tree.is_dict(reduce) else getattr(reduce, "transport", None)
    if transport is not None and transport.keeps:
        yield "memory", Memory(SLOT, nothing_kept, "partial")
    optimizer = stations.get("optimizer")
    if isinstance(optimizer, Optimizer):
        yield from (("memory", memory) for memory in memories(optimizer))


def _stands_once(value: object) -> tuple[str, str] | None:
    """Return the key and the name of what only one filler of a tuple station may do; None for what all may."""
    if isinstance(value, Dimension) and isinstance(value.placement, Shard):
        return "topology.shard", "the sharding of the state"
    if isinstance(value, Measure) and value.skips:
        return "measure.skips", "what skips a step"
    if forms.writes_params(value):
        return "after.params", "what writes parameters after an update"
    return None


def _memories(value: Memory | dict[str, Any]) -> dict[str, Memory]:
    """Return memories by slot, given one, or what `slots` was filled with."""
    if isinstance(value, dict):
        return {slot: Memory(slot, init, "parameters") for slot, init in value.items()}
    return {value.slot: value}


def _station(step: Step, name: str) -> Any:
    """Return what is at a station. Raises `ComposeError` for a name that is none."""
    fields = [field.name for field in attrs.fields(type(step))]
    names = [*fields[: fields.index("memory") + 1], "slots"]  # what follows in `fields` is no station
    if name == "slots":
        return step.memory
    if name not in names:
        hint = _GONE.get(name) or nearest(name, names)
        raise ComposeError("there is no such station", where="fill", got=name, want=", ".join(names), hint=hint)
    return getattr(step, name)


def _fields(filler: object) -> list[str]:
    """Return the names of a station's fields, none where it is not a record."""
    return [field.name for field in attrs.fields(type(filler))] if attrs.has(type(filler)) else []


def _evolved(name: str, current: Any, value: dict[str, Any]) -> Any:
    """Return a station with some of its fields replaced. Raises `ComposeError` for others than it has."""
    names = _fields(current)
    other = next((field for field in value if field not in names), None)
    if other is not None:
        raise ComposeError(
            "the station has no such field",
            where=f"station {name!r}",
            got=str(other),
            want=", ".join(names) or "a value, not a dict",
            hint=did_you_mean(str(other), names),
        )
    for field, filler in value.items():
        forms.field(name, field, filler)
    return attrs.evolve(current, **value)


def conflict(
    step: Step, what: str, first: int, hint: str, *, drop: int | None = None, instead: str | None = ""
) -> ComposeError:
    """Return the error of two fillers; `drop` is the position that the better composition leaves out.

    Of two uses of a transform one that says what both do is better, unless `instead` is.
    """
    written, second = step.composition, step.composing.position
    joined = "" if instead else written[first].joined(written[second])
    better: dict[int, Any] = {second: instead or joined or written[second]}
    if joined or drop is not None:
        better[first if joined or drop is None else drop] = None
    want = [better.get(i, t) for i, t in enumerate(written) if better.get(i, t) is not None]
    return ComposeError(
        f"{what} is already filled by {written[first]} (position {first}); {written[second]} fills it too.",
        where=f"position {second}",
        got=written_out(written),
        want=written_out(want),
        hint=hint,
    )


def written_out(parts: Any) -> str:
    """Return parts of a composition as they would be written."""
    return f"compose({', '.join(map(str, parts))})"
