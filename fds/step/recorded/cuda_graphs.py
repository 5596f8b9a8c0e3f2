"""CUDA graphs of steps: which calls are run, which is captured, and what a replay needs of the host.

Source: torch.cuda.graphs; https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Hashable
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import random, tree
from fds.state import State
from fds.step.all_stations import Program, Stations
from fds.step.checks.state_check import StateTensors
from fds.step.recorded import refusals
from fds.step.recorded.generators import Seeding
from fds.step.recorded.recorder import Kind, Recorder, Recordings, Work, elsewhere, refuse_first
from fds.step.recorded.state_memory import BatchMemory, Results, StateMemory

_STEP = "state.step"  # the place of the state's `step` among results
# which torch leaves without types
_segments: Callable[[Any], list[dict[str, Any]]] = torch.cuda.memory_snapshot  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
# private: torch has no public function for it
_clear_workspaces: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)  # pyright: ignore[reportPrivateUsage]


@attrs.define(eq=False)
class CudaDevice:
    """A GPU: graphs of one step share a pool of memory, since nothing in it outlives a replay."""

    device: torch.device
    generator: torch.Generator
    stream: torch.cuda.Stream
    pool: Any
    graphs: weakref.WeakSet[Any] = tree.new(weakref.WeakSet)  # that have the pool

    @classmethod
    def open(cls, device: torch.device) -> CudaDevice | None:
        """Open a device; return None for one that is no GPU."""
        if device.type != "cuda":
            return None
        _, generator = random.default_generators([device])
        return cls(device, generator, torch.cuda.Stream(device), torch.cuda.graph_pool_handle())

    @property
    def num_bytes(self) -> int:
        """The bytes of the pool, used or not."""
        return sum(segment["total_size"] for segment in _segments(self.pool))

    @contextlib.contextmanager
    def apart(self) -> Generator[None]:
        """Work on the stream that captures, where nothing waits that a capture would wait for."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            current.wait_stream(self.stream)

    @contextlib.contextmanager
    def strict(self) -> Generator[None]:
        """Work there, and raise `RuntimeError` for whatever waits for the device."""
        from fds.kernels.language import rehearsing_capture  # loads Triton, so only on a GPU

        before = torch.cuda.get_sync_debug_mode()
        with self.apart(), rehearsing_capture():  # in which kernels are launched as in a capture
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    @contextlib.contextmanager
    def capture(self, states: list[torch.Generator]) -> Generator[torch.cuda.CUDAGraph]:
        """Capture what is done inside; other threads may go on with what cannot be captured, such as pinning memory."""
        if not self.graphs:  # torch refuses a pool that had graphs and has none
            self.pool = torch.cuda.graph_pool_handle()
        with (
            torch.cuda.device(self.device),  # a state that is registered has its seed on the current one
            torch.cuda.stream(torch.cuda.current_stream(self.device)),  # which a failed capture does not restore
            _workspaces_in_the_pool(),
        ):
            graph = torch.cuda.CUDAGraph()
            for state in states:
                graph.register_generator_state(state)  # pyright: ignore[reportUnknownMemberType]  (as above)
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                yield graph
        self.graphs.add(graph)


@attrs.frozen
class CudaGraphs(Recorder):
    """Captures the work of GPUs; on other devices every call is run.

    The second call on a kind of batch is run under the rules of a capture, so that what breaks them is refused by name,
    before anything is written. The third is captured, and from then on calls are replays.
    """

    open_device: Callable[[torch.device], CudaDevice | None] = CudaDevice.open

    def __repr__(self) -> str:
        return "one CUDA graph for every kind of batch; on other devices at once"

    def refuse(self, step: Stations) -> None:
        """Raise `ComposeError` for a step that cannot be captured."""
        kept = "" if step.place.donate else "the old state is kept"
        donated = (kept, "fds.donate() too", "a graph writes to the same memory in every replay")
        what, meeting = "a CUDA graph cannot capture this step", "ranks that share a step are not captured yet"
        refuse_first(what, [donated, *elsewhere(step, meeting=meeting)])

    def open(self, device: torch.device) -> Recordings | None:
        """Return an empty cache; None for a device that is no GPU."""
        gpu = self.open_device(device)
        return None if gpu is None else _Captures(device, gpu)


@attrs.define(eq=False)
class _Captures(Recordings):
    """The captured work of a step, by the memory that a state is in, and the kind of batch."""

    gpu: CudaDevice

    def may_record(self, state: State) -> bool:
        return not state.token.readers  # a save reads the state: nothing may be written over it

    def key(self, state: State, held: StateTensors, kind: Kind) -> tuple[StateMemory, Hashable]:
        """Return memory that a state is in, and in which nobody else reads it, and the batch's key."""
        devices = {x.device for x in (state.step, *tree.leaves(state.params))}
        if len(devices) > 1:
            raise refusals.DEVICES.error("a state on " + ", ".join(sorted(map(str, devices))))
        structure, rest = held.structure, tree.leaves((state.buffers, state.slots))  # so every leaf is in one more list
        memories = dict.fromkeys(memory for memory, _ in self.works)
        memory = next((memory for memory in memories if memory.takes(state, structure)), None)
        if memory is None:
            state.token.memory = None
            self.works = {key: work for key, work in self.works.items() if key[0].is_wanted(state)}
            memory = StateMemory.of(state, structure)
        del rest
        return memory, kind.key

    def new_work(self, place: StateMemory, kind: Kind) -> Work:
        return _CapturedWork(self.gpu, place, BatchMemory.like(kind))

    @property
    def num_bytes(self) -> int:
        works = (work for work in self.works.values() if isinstance(work, _CapturedWork))
        return self.gpu.num_bytes + sum(x.nbytes for work in works for x in work.batch.tensors)


@attrs.define(eq=False)
class _CapturedWork:
    """The work on batches of one kind, in one memory of the state: run, rehearsed and captured."""

    gpu: CudaDevice
    memory: StateMemory
    batch: BatchMemory
    results: Results | None = None
    seeding: Seeding | None = None  # of the rehearsal, then of the graph
    graph: torch.cuda.CUDAGraph | None = None

    def __call__(
        self, program: Program, state: State, held: StateTensors, kind: Kind
    ) -> tuple[State, dict[str, Tensor]]:
        self.batch.copy(kind)
        if self.results is None:
            self._run(program, state, self.gpu.apart(), random.scope([state.step.device]))
        elif self.seeding is None:
            seeding = Seeding(self.gpu.generator)
            self._run(program, state, self.gpu.strict(), seeding.running())
            self.seeding = seeding
        else:
            if self.graph is None:
                seeding = self.seeding.capturing()
                with _refusing(""), seeding.running(), self.gpu.capture(seeding.all_states) as graph:
                    self._do(program, self.memory.state(state))
                self.seeding, self.graph = seeding, graph
            self._replay(self.graph, self.seeding, state)
        assert self.results is not None
        metrics = self.results.read()
        return self.memory.returned(state, metrics.pop(_STEP)), metrics

    def _run(self, program: Program, state: State, *scopes: contextlib.AbstractContextManager[None]) -> None:
        """Do the work in scopes, the outer one of the device."""
        inner = self.memory.state(state)
        try:
            with _refusing("synchronizing"), scopes[0], scopes[1]:  # the word of torch's errors
                self._do(program, inner)
        finally:
            if inner.token.spent_at is not None:
                _give_up(state)

    def _replay(self, graph: torch.cuda.CUDAGraph, seeding: Seeding, state: State) -> None:
        """Have the device do the work."""
        seeding.seed(state.key, state.calls)
        _give_up(state)
        torch.autograd.graph.increment_version(self.memory.leaves)  # a graph of autograd that saved these must fail
        graph.replay()
        seeding.forget_unused()

    def _do(self, program: Program, state: State) -> None:
        """Do the work on a state in this memory, and write its results there."""
        after, metrics = program.work(state, program.check(state), self.batch.batch)
        results = {**metrics, _STEP: after.step}
        if self.results is None:
            self.results = Results.like(results)
        elif not self.results.fits(results):
            want = "those of the call before, of the same dtypes"
            raise refusals.OTHER_PATH.error(f"metrics {', '.join(metrics)}", want=want)
        self.results.write(results)
        self.memory.write(after)


def _give_up(state: State) -> None:
    """Mark a state that was given to a call as given up."""
    state.token.spent_at, state.token.memory = int(state.calls), None


@contextlib.contextmanager
def _refusing(words: str) -> Generator[None]:
    """Name the user's line with errors of torch that have these words in them."""
    try:
        yield
    except RuntimeError as error:
        if words in str(error):
            raise refusals.READ.caused_by(error) from error
        raise


@contextlib.contextmanager
def _workspaces_in_the_pool() -> Generator[None]:
    """Have cuBLAS take workspaces from the memory of the graph that is captured inside.

    Those that a stream has already are freed when any graph that was captured on it is destroyed, and the others would
    go on writing to them (torch 2.12 and 2.13, CUDAGraph::reset; `torch._inductor.cudagraph_trees` does as here).
    """
    _clear_workspaces()
    try:
        yield
    finally:
        _clear_workspaces()
