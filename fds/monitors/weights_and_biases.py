"""`WandB`: a run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fds.errors import FdsError, checked_call
from fds.monitors.sink import Event, checked_every, checked_path, checked_texts, needs

_MODES = ("online", "offline", "disabled")


class WandB:
    """Log to Weights & Biases, whose step is `x`; the run begins with the first event.

    A run that goes on under the same `id` is continued there; of what it logs a second time W&B keeps the first.

    Args:
        project: that the run is filed under; None for what W&B takes itself.
        team: account that it belongs to (`entity`).
        group: of runs.
        name: that people see.
        id: of the run, to continue it; None for a new one every time.
        mode: "online", "offline" (files that `wandb sync` sends later) or "disabled"; None for what the environment
            says.
        directory: of its files; None for the working directory.
        every: calls between two events of a metric.

    Needs the package wandb, which the extra `wandb` brings. Raises `FdsError` where it is missing, and for
    arguments of another kind.
    """

    @checked_call
    def __init__(
        self,
        project: str | None = None,
        *,
        team: str | None = None,
        group: str | None = None,
        name: str | None = None,
        id: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        directory: str | Path | None = None,
        every: int = 1,
    ):
        self.every = checked_every(every, "WandB")
        self._options: dict[str, Any] = checked_texts(
            "WandB", project=project, entity=team, group=group, name=name, id=id
        )
        if mode is not None and mode not in _MODES:
            raise FdsError("no such mode", where="WandB, mode", got=repr(mode), want=", ".join(_MODES))
        needs("wandb", "wandb", "WandB")
        self._options |= {
            "resume": None if id is None else "allow",
            "mode": mode,
            "dir": None if directory is None else checked_path(directory, "WandB, directory"),
        }
        self._run: Any = None

    def __repr__(self) -> str:
        return f"WandB({self._options['project']!r})"

    def write(self, events: Sequence[Event]) -> None:
        """Log the events together."""
        if self._run is None:
            import wandb  # pyright: ignore[reportMissingImports]

            self._run = wandb.init(**self._options)
        self._run.log({event.tag: event.value for event in events}, step=int(events[0].x))

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()
