"""`profile_memory`: what a step holds at its peak, predicted and measured."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from fds import _html, tree
from fds.errors import FdsError
from fds.profiling.counting import PHASES
from fds.profiling.holding import Holding
from fds.profiling.predicted import MemoryEstimate, leaves_of, predicted
from fds.state import State
from fds.step import Step
from fds.step.checks.state_check import usable
from fds.step.stations import AtOnce

_STATE, _NEXT, _AWAY, _BATCH = "state", "next state", "elsewhere", "batch"


@attrs.frozen
class MemoryProfile:
    """What a step held on this rank at the peak of a call; `str()` of it is a table.

    Attributes:
        predicted: by formula, from shapes alone.
        measured: what -> bytes of tensors on the device at the peak: "state", "next state", "batch", and what was made
            in "forward" and "recomputation" (activations), "backward" (gradients, and what they come from) and "update"
            (whole parameters, sums, and what the optimizer needs).
        modules: name of a module -> bytes at the peak that were made in it, the most first: who holds the peak.
        allocated: what torch's allocator of a GPU says of the peak; None on a CPU.
    """

    predicted: MemoryEstimate
    measured: Mapping[str, int]
    modules: Mapping[str, int]
    allocated: int | None = None

    @property
    def peak(self) -> int:
        """Bytes of tensors on the device at the peak, the batch and activations included."""
        return sum(self.measured.values())

    @property
    def activations(self) -> int:
        """Bytes at the peak that no formula predicts: the batch, and what forward and recomputations made."""
        return sum(self.measured.get(name, 0) for name in (_BATCH, "forward", "recomputation"))

    def __str__(self) -> str:
        return "\n".join(f"{name:<24} {n:>18,} bytes {words}".rstrip() for name, n, words in self._rows())

    def _repr_html_(self) -> str:
        rows = [(name, f"{n:,}", "bytes", words) for name, n, words in self._rows()]
        return _html.box("Memory of a step", _html.table(rows, right=(1,)))

    def _rows(self) -> list[tuple[str, int, str]]:
        rows = [(name, n, "at the peak, measured") for name, n in self.measured.items() if n]
        rows += [("peak", self.peak, "measured")]
        rows += [("without activations", self.peak - self.activations, "measured")]
        rows += [("without activations", self.predicted.peak, "predicted, of which")]
        rows += [(f"  {name}", n, "") for name, n in self.predicted.step.items() if n]
        rows += [] if self.allocated is None else [("peak", self.allocated, "by torch's allocator")]
        return rows + [(name or "outside of modules", n, "") for name, n in list(self.modules.items())[:8]]


def profile_memory(step: Step, state: State, batch: Any) -> MemoryProfile:
    """Measure what a call of the step holds at its peak on this rank, beside what formulas predict.

    The step runs twice with copies of the state, and what it returns is dropped; the second call is measured, which
    finds the memory of the first as every later call does. What is compiled, and what CUDA graphs would replay, runs as
    it is written. Where ranks share the step all of them call this.

    Args:
        step: what `compose(...)(loss)` returned.
        state: of it.
        batch: as for a call.

    Raises `FdsError` for what is no step, and all that a call raises.
    """
    if not isinstance(step, Step):
        raise FdsError("only a step can be profiled", where="step", got=type(step).__name__, want="a step")
    usable(state, "profile_memory")
    plain = attrs.evolve(step, run=AtOnce())
    held, device = Holding(), state.step.device
    if plain.place.donate:
        state = tree.map(torch.clone, state)  # outside of the mode, which would hold the user's own against the step
    with torch.compiler.set_stance("force_eager"), held.modules, held:
        _name(held, plain, state, _STATE)
        held.name((_BATCH, ""), tree.leaves(batch))
        new, _ = plain(state, batch)
        gc.collect()
        _name(held, plain, new, _STATE if plain.place.donate else _NEXT)
        estimate = predicted(plain, new)
        if plain.place.donate:
            state = new
        del new
        held.begin()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        new, _ = plain(state, batch)
    allocated = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    measured: dict[str, int] = dict.fromkeys([_STATE, _NEXT, _BATCH, *map(str, PHASES)], 0)
    for x, _, there in leaves_of(plain, new):
        if not there and (made := held.at_peak_of(x)):
            held.at_peak[made] -= x.untyped_storage().nbytes()
    modules: dict[str, int] = {}
    for (what, module), n in held.at_peak.items():
        if what != _AWAY:
            measured[what] += n
        if what in PHASES:
            modules[module] = modules.get(module, 0) + n
    ordered = dict(sorted(((name, n) for name, n in modules.items() if n), key=lambda one: -one[1]))
    return MemoryProfile(estimate, measured, ordered, allocated)


def _name(held: Holding, step: Step, state: State, what: str) -> None:
    """Say what the leaves of a state are."""
    for x, written, there in leaves_of(step, state):
        held.name((_AWAY if not there else what if written else _STATE, ""), [x])
    held.name((_STATE, ""), tree.leaves(state.buffers))
