"""The station `run` of a captured step: which calls are run, which is captured, and what a replay needs of the host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import FdsError
from fds.state import State
from fds.step.captured.batches import MOST_KINDS, BatchMemory, Kind
from fds.step.captured.memory import Results, StateMemory
from fds.step.captured.seeding import Seeding, Seeds
from fds.step.checks import capture
from fds.step.checks.state_check import StateTensors
from fds.step.stations import Program

SYNCHRONIZING = "synchronizing"  # in the errors that `Device.strict` raises, as torch's do
_STEP = "state.step"  # the place of the state's `step` among results


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Have the device do it again, in the same memory."""
        ...


class Device(Protocol):
    """A device that captures work: its default generator, a stream for this, and memory that graphs share."""

    @property
    def generator(self) -> torch.Generator:
        """The default generator."""
        ...

    @property
    def num_bytes(self) -> int:
        """The bytes that graphs have for what lies between their inputs and outputs."""
        ...

    def apart(self) -> contextlib.AbstractContextManager[None]:
        """Return a scope in which work is done where it would be captured."""
        ...

    def strict(self) -> contextlib.AbstractContextManager[None]:
        """Return a scope in which what cannot be captured raises `RuntimeError`, such as to read a number."""
        ...

    def capture(self, states: list[torch.Generator]) -> contextlib.AbstractContextManager[Graph]:
        """Return a scope in which work is captured and not done, which may draw from these states of the generator."""
        ...


class Captures(Protocol):
    """What captures work."""

    def open(self, device: torch.device) -> Device | None:
        """Return a device that captures its work; None for one that does not."""
        ...


@attrs.define(eq=False)
class Work:
    """The work on batches of one kind, in one memory of the state: run twice, then captured."""

    batch: BatchMemory
    results: Results | None = None
    ran: bool = False
    seeding: Seeding | None = None  # of the second run
    graph: Graph | None = None
    seeds: Seeds | None = None


@attrs.define(eq=False)
class Recordings:
    """What a step has captured: a cache, without which every number is the same."""

    device: torch.device
    at: Device | None  # None where nothing is captured
    states: dict[StateMemory, dict[Hashable, Work]] = tree.new(dict)
    lock: Any = attrs.field(factory=threading.RLock)

    def memory_for(self, state: State, held: StateTensors) -> StateMemory:
        """Return memory that a state is in, and in which nobody else reads it."""
        structure, rest = held.structure, tree.leaves((state.buffers, state.slots))  # so every leaf is in one more list
        found = next((memory for memory in self.states if memory.takes(state, structure)), None)
        if found is None:
            state.token.memory = None
            self.states = {memory: works for memory, works in self.states.items() if memory.is_wanted(state)}
            found = StateMemory.of(state, structure)
            self.states[found] = {}
        del rest
        return found

    @property
    def num_bytes(self) -> int:
        """The bytes held beside the state: what graphs share, and the memory of batches."""
        works = [work for known in self.states.values() for work in known.values()]
        return (0 if self.at is None else self.at.num_bytes) + sum(work.batch.num_bytes for work in works)

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()  # a copy of a step has no graphs


@attrs.frozen
class Captured:
    """Captures the work of a call once for every kind of batch, and replays it.

    The first call on a kind of batch is run as if nothing were captured, and what happens once happens there: kernels
    are compiled, checks that read values are made. The second is run under the rules of a capture, so that what breaks
    them is refused by name, before anything is written. The third is captured, and from then on calls are replays.
    """

    captures: Captures

    def __repr__(self) -> str:
        return repr(self.captures)

    def refuse(self, step: capture.HasStations) -> None:
        """Raise `ComposeError` for a step that cannot be captured."""
        capture.composition(step)

    def __call__(
        self, program: Program, state: State, held: StateTensors, batch: Any
    ) -> tuple[State, dict[str, Tensor]]:
        """Return the next state and the metrics."""
        known = program.runtime.captured
        if known[0] is None or known[0].device != state.step.device:
            known[0] = Recordings(state.step.device, self.captures.open(state.step.device))
        recordings: Recordings = known[0]
        if recordings.at is None or state.token.readers:  # a save reads the state: nothing may be written over it
            return program.work(state, held, batch)
        with recordings.lock:
            return self._captured(recordings, recordings.at, program, state, held, batch)

    def _captured(
        self, recordings: Recordings, device: Device, program: Program, state: State, held: StateTensors, batch: Any
    ) -> tuple[State, dict[str, Tensor]]:
        devices = {x.device for x in (state.step, *tree.leaves(state.params))}
        if len(devices) > 1:
            raise capture.state_of(devices)
        kind = Kind.of(batch, state.step.device)
        memory = recordings.memory_for(state, held)
        works = recordings.states[memory]
        work = works.get(kind.key)
        if work is None:
            if len(works) == MOST_KINDS:
                raise capture.too_many(capture.shapes_of(batch), MOST_KINDS)
            work = works[kind.key] = Work(BatchMemory.like(kind))
        work.batch.take(kind)
        call = OneCall(program, device, memory, work, state)
        if not work.ran:
            call.run(device.apart())
            work.ran = True
        elif work.seeding is None:
            work.seeding = call.run(device.strict(), rehearsing=True)
        else:
            if work.graph is None:
                call.capture()
            call.replay()
        assert work.results is not None
        found = work.results.read()
        return memory.returned(state, found.pop(_STEP)), found


@attrs.frozen(eq=False)
class OneCall:
    """One call, in memory that holds its state and its batch already."""

    program: Program
    device: Device
    memory: StateMemory
    work: Work
    state: State  # as it was given

    def run(self, scope: contextlib.AbstractContextManager[None], *, rehearsing: bool = False) -> Seeding:
        """Do the work in a scope of the device; return what seeded generators in it."""
        inner, seeding = self.memory.state(self.state), Seeding(self.device.generator, rehearsing=rehearsing)
        try:
            with scope, seeding.running():
                self._do(inner)
        except FdsError:
            raise
        except RuntimeError as error:
            if SYNCHRONIZING in str(error):
                raise capture.synchronized(error) from error
            raise
        finally:
            if inner.token.spent_at is not None:
                self._give_up()
        return seeding

    def capture(self) -> None:
        """Capture the work, which is not done."""
        assert self.work.seeding is not None
        seeding = self.work.seeding.repeated()
        try:
            with seeding.running(), self.device.capture(seeding.states) as graph:
                self._do(self.memory.state(self.state))
        except FdsError:
            raise
        except RuntimeError as error:
            raise capture.synchronized(error) from error
        seeding.check_whole()
        self.work.graph, self.work.seeds = graph, seeding.seeds()

    def replay(self) -> None:
        """Have the device do the work."""
        work = self.work
        assert work.graph is not None and work.seeds is not None
        work.seeds.set(self.state.key, self.state.calls)
        self._give_up()
        torch.autograd.graph.increment_version(self.memory.leaves)  # a graph that saved these must fail
        work.graph.replay()
        work.seeds.forget_unused()

    def _do(self, state: State) -> None:
        """Do the work on a state in this memory, and write its results there."""
        after, metrics = self.program.work(state, self.program.check(state), self.work.batch.batch)
        found = {**metrics, _STEP: after.step}
        if self.work.results is None:
            self.work.results = Results.like(found)
        elif not self.work.results.fits(found):
            raise capture.other_path(f"metrics {', '.join(metrics)}", "those of the call before, of the same dtypes")
        self.work.results.write(found)
        self.memory.write(after)

    def _give_up(self) -> None:
        """Mark the state that was given to the call as such."""
        self.state.token.spent_at, self.state.token.memory = int(self.state.calls), None


def _nothing() -> None:
    return None
