"""`profile_memory`: what a step holds at its peak, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from fds import _html
from fds.collectives.traffic import counting
from fds.errors import FdsError
from fds.profiling.counting import PHASES
from fds.profiling.peaks import BATCH, NEXT, STATE, Heard, of_dry_run, of_second_call
from fds.profiling.predicted import MemoryEstimate, predicted
from fds.state import State
from fds.step import Step
from fds.step.checks.state_check import usable


@attrs.frozen
class MemoryProfile:
    """What a step held on this rank at the peak of a call; `str()` of it is a table.

    Attributes:
        predicted: by formula, from shapes alone; and by a dry run, with activations.
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
        return sum(self.measured.get(name, 0) for name in (BATCH, "forward", "recomputation"))

    def __str__(self) -> str:
        lines = [f"{name:<24} {n:>18,} bytes {words}".rstrip() for name, n, words in self._rows()]
        return "\n".join([*lines, *self._notes()])

    def _repr_html_(self) -> str:
        rows = [(name, f"{n:,}", "bytes", words) for name, n, words in self._rows()]
        return _html.box("Memory of a step", _html.table(rows, right=(1,)), *map(_html.text, self._notes()))

    def _notes(self) -> list[str]:
        why = self.predicted.no_dry_run.partition("\n")[0]
        return [f"no dry run: {why}"] if why else []

    def _rows(self) -> list[tuple[str, int, str]]:
        rows = [(name, n, "at the peak, measured") for name, n in self.measured.items() if n]
        rows += [("peak", self.peak, "measured")]
        if self.predicted.dry_run is not None:
            rows += [("peak", self.predicted.dry_run, "predicted by a dry run")]
        rows += [("without activations", self.peak - self.activations, "measured")]
        rows += [("without activations", self.predicted.peak, "predicted, of which")]
        rows += [(f"  {name}", n, "") for name, n in self.predicted.step.items() if n]
        rows += [] if self.allocated is None else [("peak", self.allocated, "by torch's allocator")]
        return rows + [(name or "outside of modules", n, "") for name, n in list(self.modules.items())[:8]]


def profile_memory(step: Step, state: State, batch: Any) -> MemoryProfile:
    """Measure what a call of the step holds at its peak on this rank, beside what formulas and a dry run predict.

    The step runs twice with copies of the state, and what it returns is dropped; the second call is measured, which
    finds the memory of the first as every later call does. What is compiled, and what CUDA graphs would replay, runs as
    it is written. On a CPU it runs after that without arithmetic, in memory that nobody touches: a dry run. Where
    ranks share the step all of them call this.

    Args:
        step: what `compose(...)(loss)` returned.
        state: of it.
        batch: as for a call.

    Raises `FdsError` for what is no step, and all that a call raises.
    """
    if not isinstance(step, Step):
        raise FdsError("only a step can be profiled", where="step", got=type(step).__name__, want="a step")
    usable(state, "profile_memory")
    device, heard = state.step.device, Heard()
    with counting(heard):
        found = of_second_call(step, state, batch)
    allocated = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    expected, why_not = None, "on a GPU memory is taken without being touched"
    if device.type == "cpu":
        try:
            expected, why_not = of_dry_run(step, state, batch, heard.exchanges), ""
        except Exception as error:  # nothing is wrong with the step itself, which ran
            why_not = f"{type(error).__name__}: {error}"
    measured: dict[str, int] = dict.fromkeys([STATE, NEXT, BATCH, *map(str, PHASES)], 0)
    modules: dict[str, int] = {}
    for (what, module), n in found.items():
        measured[what] += n
        if what in PHASES:
            modules[module] = modules.get(module, 0) + n
    ordered = dict(sorted(modules.items(), key=lambda one: -one[1]))
    return MemoryProfile(predicted(step, state, expected, why_not), measured, ordered, allocated)
