"""How long the parts of a step take: `fds.timed` in every so many calls, `fds.trace` all of one call on all ranks."""

from fds.timing._timed import Timed, Times, timed
from fds.timing._trace import trace

__all__ = ["Timed", "Times", "timed", "trace"]
