"""When a call waits for messages: from `work.wait()` until what was sent is there."""

from __future__ import annotations

import attrs

from fds.collectives.links import Collective, Work
from fds.collectives.traffic import Traffic
from fds.step.ranges import profiled

WAIT = "wait"


class Waits(Traffic):
    """Have every wait for a collective be a range, named `wait/all_reduce (sum) of (8,) float32 on axis 'dp'`."""

    def watched(self, collective: Collective, work: Work) -> Work:
        """Return work whose `wait` is a range."""
        return Watched(work, f"{WAIT}/{collective}")


@attrs.frozen(eq=False)
class Watched:
    """A collective whose `wait` is a range."""

    work: Work
    name: str

    def wait(self) -> None:
        """Wait for the result."""
        with profiled(self.name):
            self.work.wait()

    def done(self) -> bool:
        """Return whether `wait` is known to return at once."""
        return self.work.done()
