"""The station `run` of `fds.compile(whole=True)`: the work of a call, recorded once as one graph, and compiled."""

from fds.step.compiled.backends import Backend
from fds.step.compiled.running import Compiled

__all__ = ["Backend", "Compiled"]
