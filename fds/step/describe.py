"""What a step is, in words: station by station, the bytes that it holds, the parameters that its loss ignores."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from fds import loss as losses, random, tree
from fds.state import State
from fds.step.gradients import Sums

STATIONS = (
    "batch", "split", "frozen", "gather", "view", "context", "loss", "layer", "scale", "sum", "reduce", "measure",
    "condition", "optimizer", "commit", "after", "place",
)  # fmt: skip


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
    for station in STATIONS:
        value = losses.name(step.loss) if station == "loss" else getattr(step, station)
        default = attrs.fields_dict(type(step))[station].default
        if value not in (default, None, ()):
            told[station] = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    if state is None:
        return Description(told)
    state.check("describe")
    structure = step.structure_of(state.params)
    held = {part: tree.num_bytes(getattr(state, part)) for part in ("params", "opt", "buffers", "slots")}
    trained = set(structure.trained)
    whole = step.gather(structure.names, tree.leaves(state.params))
    held["gradients"] = sum(x.numel() * (step.sum.dtype or x.dtype).itemsize for x in structure.pick(whole))
    frozen = tuple(n for i, n in enumerate(structure.names) if i not in trained)
    return Description(told, held, frozen, () if batch is None else _unused(step, state, batch))


def _unused(step: Any, state: State, batch: Any) -> tuple[str, ...]:
    structure = step.structure_of(state.params)
    whole = step.gather(structure.names, tree.leaves(state.params))
    seen = [x.detach().requires_grad_() for x in structure.pick(whole)]
    microbatch, sums = step.microbatches(batch)[0], Sums.over(seen, None)
    setting = step.settings(state, 1)[0]
    with random.scope(setting.devices), torch.enable_grad():
        outcome = step.run_loss(step.loss, structure.put(whole, seen), microbatch, state.buffers, setting)
        sums.add(outcome, None, losses.name(step.loss))
    return tuple(structure.names[i] for i, x in zip(structure.trained, seen, strict=True) if x.grad is None)
