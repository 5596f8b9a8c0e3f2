"""What a step is, in words: station by station, the bytes that it holds, the parameters that its loss ignores."""

from __future__ import annotations

import inspect
from typing import Any

import attrs

from fds import tree
from fds.state import State
from fds.step.check import usable


@attrs.frozen
class Description:
    """A step in words; `str()` of it is a table.

    Attributes:
        stations: station -> what fills it, in program order, filled ones only.
        num_bytes: part of the state -> bytes held between steps; `gradients` within one. Empty without a state.
        frozen: names of parameters that are not trained.
        unused: names of trained parameters that the loss did not use on the batch: their gradient is zero.
    """

    stations: dict[str, str]
    num_bytes: dict[str, int] = attrs.field(factory=dict)
    frozen: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{name:<10} {text}" for name, text in self.stations.items()]
        lines += [f"{name:<10} {n:>16,} bytes" for name, n in self.num_bytes.items()]
        lines += [f"frozen     {', '.join(self.frozen)}"] if self.frozen else []
        lines += [f"unused     {', '.join(self.unused)}: zero gradient"] if self.unused else []
        return "\n".join(lines)


def describe(step: Any, state: State | None, batch: Any) -> Description:
    """Return the description of a step; see `Step.describe`."""
    told = {}
    for station in attrs.fields(type(step)):
        if station.name == "slots":  # what follows is not a station
            break
        value = getattr(step, station.name)
        if station.name != "eval_loss" and value not in (station.default, None, ()):
            told[station.name] = ", ".join(map(_text, value)) if isinstance(value, tuple) else _text(value)
    if state is None and batch is None:
        return Description(told)
    usable(state, "describe")
    assert state is not None
    structure, leaves = step.structure_of(state.params)
    held = {part: tree.num_bytes(getattr(state, part)) for part in ("params", "opt", "buffers", "slots")}
    trained = set(structure.trained)
    whole = step.gather(structure.names, leaves)
    held["gradients"] = sum(x.numel() * (step.sum.dtype or x.dtype).itemsize for x in structure.pick(whole))
    frozen = tuple(n for i, n in enumerate(structure.names) if i not in trained)
    return Description(told, held, frozen, () if batch is None else _unused(step, state, batch))


def _text(value: Any) -> str:
    return value.__name__ if inspect.isfunction(value) else str(value)


def _unused(step: Any, state: State, batch: Any) -> tuple[str, ...]:
    structure, leaves = step.structure_of(state.params)
    exact = attrs.evolve(step, sum=type(step.sum)())  # gradients stay where they can be seen
    sums, _ = exact.backward(state, structure, leaves, batch, None)
    found = zip(structure.trained, sums.leaves, strict=True)
    return tuple(structure.names[i] for i, x in found if x.grad is None)
