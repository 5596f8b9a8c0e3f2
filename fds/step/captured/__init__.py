"""The station `run` of `fds.cuda_graph`: the work of a call, captured once in memory that stays, and replayed."""

from fds.step.captured.cuda import CudaGraphs
from fds.step.captured.running import Captured

__all__ = ["Captured", "CudaGraphs"]
