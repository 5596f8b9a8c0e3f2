"""What is held at the peak of a step's call, in a real run or in a dry one."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives.dry import dry
from fds.collectives.links import Collective, Exchange, Work
from fds.collectives.traffic import Traffic
from fds.profiling.dry_run import DryRun
from fds.profiling.holding import Holding, Kind
from fds.state import State
from fds.step import Step
from fds.step.residency.contract import is_held
from fds.step.stations import AtOnce

STATE, NEXT, BATCH = "state", "next state", "batch"
_AWAY = "elsewhere"


@attrs.define(eq=False)
class Heard(Traffic):
    """The exchanges of this rank, in order, kept while calls run: what a dry run is told."""

    exchanges: list[Exchange] = attrs.field(factory=list)

    def watched(self, collective: Collective, work: Work) -> Work:
        """Keep an exchange, which has its replies once it was waited for."""
        if isinstance(work, Exchange):
            self.exchanges.append(work)
        return work


def of_second_call(step: Step, state: State, batch: Any) -> Counter[Kind]:
    """Return kind -> bytes on the device at the peak of the second of two calls; what they return is dropped.

    The first makes the memory that every later call finds. A state that would be given up is copied.
    """
    plain, device = attrs.evolve(step, run=AtOnce()), state.step.device
    held, donates = Holding(), plain.place.donate
    if donates:
        state = tree.map(torch.clone, state)  # outside of the mode, which would hold the user's own against the step
    with torch.compiler.set_stance("force_eager"), held.modules, held:
        _name(held, plain, state, STATE)
        held.name((BATCH, ""), tree.leaves(batch))
        new, _ = plain(state, batch)
        gc.collect()
        _name(held, plain, new, STATE if donates else NEXT)
        if donates:
            state = new
        del new
        held.begin()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        new, _ = plain(state, batch)
    found = held.at_peak
    for x, _, there in leaves_of(plain, new):
        if not there and (made := held.at_peak_of(x)):
            found[made] -= x.untyped_storage().nbytes()
    return Counter({kind: n for kind, n in found.items() if n and kind[0] != _AWAY})


def of_dry_run(step: Step, state: State, batch: Any, heard: Iterable[Exchange] = ()) -> int:
    """Return the bytes at the peak of a call on the CPU, found without arithmetic; nothing is written to.

    No rank waits for another, so that what fails on some alone holds no others up, and no disk is read or written:
    `heard` are the exchanges of `of_second_call`. Raises what torch does where a shape depends on values, and where an
    operator has no rule for shapes.
    """
    token = dry.set(iter(heard))
    try:
        with DryRun():
            return sum(of_second_call(step, state, batch).values())
    finally:
        dry.reset(token)


def leaves_of(step: Step, state: State) -> Iterator[tuple[Tensor, bool, bool]]:
    """Yield the leaves of params, opt and slots; whether an update writes each, and whether it lives on the device."""
    structure, parts = step.structure_of(state.params)
    residency, trained = step.place.residency, {id(parts[i]) for i in structure.trained}
    after = {one.slot for one in step.after}
    for part in ("params", "opt", "slots"):
        for path, x in tree.paths(getattr(state, part)).items():
            written = id(x) in trained if part == "params" else part == "opt" or path.partition(".")[0] in after
            leaf = step.resident(structure, f"{part}.{path}") if residency.kinds else None
            away = leaf is not None and is_held(residency, leaf, x.numel()) and residency.medium(leaf) != "device"
            yield x, written, not away


def _name(held: Holding, step: Step, state: State, what: str) -> None:
    """Say what the leaves of a state are."""
    for x, written, there in leaves_of(step, state):
        held.name((_AWAY if not there else what if written else STATE, ""), [x])
    held.name((STATE, ""), tree.leaves(state.buffers))
