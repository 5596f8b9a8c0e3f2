"""CUDA graphs, as torch captures and replays them.

Source: torch.cuda.graphs; https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator
from typing import Any

import attrs
import torch

from fds import random, tree

# which torch leaves without types
_segments: Callable[[Any], list[dict[str, Any]]] = torch.cuda.memory_snapshot  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
# private: torch has no public function for it
_clear_workspaces: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)  # pyright: ignore[reportPrivateUsage]


@attrs.frozen
class CudaGraphs:
    """Captures the work of CUDA devices; other devices have no graphs, and every call is run.

    `rehearsing` returns a scope in which kernels are launched as in a capture.
    """

    rehearsing: Callable[[], contextlib.AbstractContextManager[None]]

    def open(self, device: torch.device) -> CudaDevice | None:
        """Return what captures on this device, None for one that is no GPU."""
        return CudaDevice.of(device, self.rehearsing) if device.type == "cuda" else None

    def __repr__(self) -> str:
        return "one CUDA graph for every kind of batch; on other devices at once"


@attrs.define(eq=False)
class CudaDevice:
    """A GPU: graphs of one step share a pool of memory, since nothing in it outlives a replay."""

    device: torch.device
    generator: torch.Generator
    stream: torch.cuda.Stream
    pool: Any
    rehearsing: Callable[[], contextlib.AbstractContextManager[None]]
    graphs: weakref.WeakSet[Any] = tree.new(weakref.WeakSet)  # that have the pool

    @classmethod
    def of(cls, device: torch.device, rehearsing: Callable[[], contextlib.AbstractContextManager[None]]) -> CudaDevice:
        """Open a device."""
        _, generator = random.default_generators([device])
        return cls(device, generator, torch.cuda.Stream(device), torch.cuda.graph_pool_handle(), rehearsing)

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
        before = torch.cuda.get_sync_debug_mode()
        with self.apart(), self.rehearsing():
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
