"""The station `run` of a compiled step: which calls are run as they are, which is recorded, and what runs the graph."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils import _python_dispatch

from fds import tree
from fds.state import State
from fds.step.captured.batches import MOST_KINDS, Kind
from fds.step.captured.memory import builder, leaves_of
from fds.step.checks import capture, one_graph
from fds.step.checks.state_check import StateTensors
from fds.step.compiled.backends import Backend, Function
from fds.step.compiled.recording import Recorded, record
from fds.step.stations import Program

_is_watched = _python_dispatch.is_in_any_mode_without_ignore_compile_internals


@attrs.define(eq=False)
class Work:
    """The work on batches of one kind: run once as it is, then recorded and compiled."""

    recorded: Recorded | None = None
    function: Function | None = None


@attrs.define(eq=False)
class Graphs:
    """What a step has compiled: a cache, without which every number is the same, to rounding."""

    works: dict[Hashable, Work] = tree.new(dict)
    lock: Any = attrs.field(factory=threading.RLock)
    num_bytes: int = 0  # that graphs hold between calls

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a copy of a step has no graphs


@attrs.frozen
class Compiled:
    """Compiles the work of a call once for every kind of batch, as one graph.

    The first call on a kind of batch is run as if nothing were compiled, and what happens once happens there: kernels
    are compiled, checks that read values are made. The second is recorded, which does the work on copies, then compiled
    and run, and from then on calls run the graph.
    """

    backend: Backend

    def __repr__(self) -> str:
        return f"one graph for every kind of batch, from the batch to the update, compiled by {self.backend}"

    def refuse(self, step: capture.HasStations) -> None:
        """Raise `ComposeError` for a step that cannot be one graph."""
        one_graph.composition(step)

    def __call__(
        self, program: Program, state: State, held: StateTensors, batch: Any
    ) -> tuple[State, dict[str, Tensor]]:
        """Return the next state and the metrics."""
        if _is_watched():  # a mode that has to see every operator
            return program.work(state, held, batch)
        known = program.runtime.captured
        if known[0] is None:
            known[0] = Graphs()
        graphs: Graphs = known[0]
        with graphs.lock:
            return self._compiled(graphs, program, state, held, batch)

    def _compiled(
        self, graphs: Graphs, program: Program, state: State, held: StateTensors, batch: Any
    ) -> tuple[State, dict[str, Tensor]]:
        kind = Kind.of(batch, state.step.device)
        key = (held.structure, kind.key, _strides(state), _surroundings(state.step.device))
        work = graphs.works.get(key)
        if work is None:
            if len(graphs.works) == MOST_KINDS:
                raise capture.too_many(capture.shapes_of(batch), MOST_KINDS)
            found = program.work(state, held, batch)
            graphs.works[key] = Work()
            return found
        if work.function is None:
            work.recorded = record(program, state, held, kind, fuses=self.backend.fuses)
        assert work.recorded is not None
        draws = work.recorded.draws.made(state.key, state.calls)
        rest = [*(x.detach() for x in kind.tensors), *draws, *work.recorded.constants]
        if work.function is None:
            given = [*leaves_of(state, held.structure), state.step, *rest]
            work.function = self.backend.compile(work.recorded.graph, given)
            del given  # which would keep the state from being written over
        return _run(work.recorded, work.function, program, state, held, rest)


def _run(
    recorded: Recorded, function: Function, program: Program, state: State, held: StateTensors, rest: list[Tensor]
) -> tuple[State, dict[str, Tensor]]:
    """Run a graph over memory of the next state that holds the old values."""
    structure, new = held.structure, program.leaves(state, held)
    over = State(
        state.step,
        state.calls,
        params=structure.put(held.parts, new.trained),
        opt=new.opt,
        buffers=state.buffers,
        slots={**state.slots, **new.after},
        key=state.key,
    )
    leaves = leaves_of(over, structure)
    new.give_up(state)
    with torch.no_grad():
        step, *found = function(*leaves, state.step, *rest)
    metrics = dict(zip(recorded.metrics, found, strict=False))
    for i, x in zip(recorded.moved, found[len(metrics) :], strict=True):
        leaves[i] = x
    parts = builder(over, structure)(leaves)
    return State(step, state.calls + 1, key=state.key, token=new.token(state), **parts), metrics


def _strides(state: State) -> Hashable:
    """Return what tells states apart whose leaves lie otherwise in memory."""
    leaves = tree.leaves((state.params, state.opt, state.buffers, state.slots))
    return tuple((i, x.stride()) for i, x in enumerate(leaves) if not x.is_contiguous())


def _surroundings(device: torch.device) -> Hashable:
    """Return the settings of torch around a call that change what operators do."""
    cast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return cast, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def _nothing() -> None:
    return None
