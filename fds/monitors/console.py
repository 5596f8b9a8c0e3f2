"""`Console`: lines of text."""

from __future__ import annotations

from collections.abc import Sequence

import rich.console

from fds.display.view import short
from fds.errors import FdsError, checked_call
from fds.monitors.sink import Event, checked_every

_PART = "elapsed_time_ms_"  # before the parts of a call


class Console:
    """Print a line: `Train/Samples 5120  train_loss 2.31  lr 0.0003  grad_norm 0.82`.

    What all tags have in common stands before `x`. Of the times of `fds.timed` the whole call is printed; files have
    all of them, and `print(timed.last)` too. For a panel that is redrawn, with speeds and the time that is left,
    there is `fds.display.Progress`.

    Args:
        every: calls between two lines.
        console: where to print; None for the standard output.

    Raises `FdsError` for arguments of another kind.
    """

    @checked_call
    def __init__(self, *, every: int = 10, console: rich.console.Console | None = None):
        self.every = checked_every(every, "Console")
        if not isinstance(console, rich.console.Console | None):
            raise FdsError("not a console", where="Console", got=repr(console)[:80], want="a rich.console.Console")
        self._console = console

    def __repr__(self) -> str:
        return f"Console(every={self.every})"

    def write(self, events: Sequence[Event]) -> None:
        """Print a line."""
        events = [event for event in events if _PART not in event.tag or event.tag.endswith(f"{_PART}call")]
        common = _common([event.tag for event in events])
        numbers = [f"{event.tag[len(common) :]} {short(event.value)}" for event in events]
        line = "  ".join([f"{common.rstrip('/')} {short(events[0].x)}".strip(), *numbers])
        console = rich.console.Console() if self._console is None else self._console
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _common(tags: Sequence[str]) -> str:
    """Return what all tags begin with, up to a slash.

    >>> _common(["Train/Samples/lr", "Train/Samples/lr/*norm*"]), _common(["loss", "lr"])
    ('Train/Samples/', '')
    """
    words = [tag.split("/")[:-1] for tag in tags]
    together = 0
    while all(len(it) > together and it[together] == words[0][together] for it in words):
        together += 1
    return "".join(f"{word}/" for word in words[0][:together])
