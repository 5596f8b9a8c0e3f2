"""`TensorBoard`: event files, written by torch's own writer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fds.errors import FdsError, checked_call, is_int
from fds.monitors.sink import Event, checked_every, checked_path, needs, writable_directory


class TensorBoard:
    """Write event files for TensorBoard: `tensorboard --logdir DIRECTORY` shows them.

    A run that goes on, or back to an earlier state, writes a file of its own, which has TensorBoard leave out what
    earlier ones say of its first `x` and those behind it. Events reach the disk within `flush_seconds`, and when the
    monitor is closed.

    Args:
        directory: of the files; it is made.
        every: calls between two events of a metric.
        flush_seconds: what a process that is killed may lose.

    Needs the package tensorboard, which the extra `tensorboard` brings. Raises `FdsError` where it is missing, and for
    arguments of another kind.
    """

    @checked_call
    def __init__(self, directory: str | Path, *, every: int = 1, flush_seconds: int = 10):
        directory = checked_path(directory, "TensorBoard")
        self.every = checked_every(every, "TensorBoard")
        if not is_int(flush_seconds, 1):
            raise FdsError(
                "not a number of seconds", where="TensorBoard, flush_seconds", got=repr(flush_seconds), want="1 or more"
            )
        needs("tensorboard", "tensorboard", "TensorBoard")
        self.directory = writable_directory(directory, "TensorBoard")
        self._flush_seconds, self._writer = flush_seconds, None
        self._last = math.inf  # `x` of the last event

    def __repr__(self) -> str:
        return f"TensorBoard({str(self.directory)!r})"

    def write(self, events: Sequence[Event]) -> None:
        """Add a scalar for each event; `x` is cut to a whole number, which is all that TensorBoard has."""
        first = int(events[0].x)
        if self._writer is None or first < self._last:
            from torch.utils.tensorboard import SummaryWriter

            self.close()
            self._writer = SummaryWriter(str(self.directory), purge_step=first, flush_secs=self._flush_seconds)
        self._last = first
        for tag, value, x in events:
            self._writer.add_scalar(tag, value, int(x))

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._writer is not None:
            self._writer.close()
