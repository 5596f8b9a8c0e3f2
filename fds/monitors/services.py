"""Sinks that need other packages: `TensorBoard`, `WandB` and `Comet`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fds.errors import FdsError, checked_call, is_int
from fds.monitors._monitor import Event, check_every, check_mode, check_path, check_texts, make_directory, require


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
        directory = check_path(directory, "TensorBoard")
        self.every = check_every(every, "TensorBoard")
        if not is_int(flush_seconds, 1):
            where = "TensorBoard, flush_seconds"
            raise FdsError("not a number of seconds", where=where, got=repr(flush_seconds), want="1 or more")
        require("tensorboard", "tensorboard", "TensorBoard")
        self.directory = make_directory(directory, "TensorBoard")
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
        self.every = check_every(every, "WandB")
        texts = check_texts("WandB", project=project, entity=team, group=group, name=name, id=id)
        check_mode(mode, ("online", "offline", "disabled"), "WandB")
        require("wandb", "wandb", "WandB")
        where = None if directory is None else check_path(directory, "WandB, directory")
        resume = None if id is None else "allow"
        self._options: dict[str, Any] = {**texts, "resume": resume, "mode": mode, "dir": where}
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


class Comet:
    """Log to Comet, whose step is `x`; the experiment begins with the first event.

    What is None may come from Comet's own files and environment variables. A run that goes on under the same
    `experiment_key` is continued there.

    Args:
        project: that the experiment is filed under.
        workspace: account that the project belongs to.
        name: that people see.
        experiment_key: of the experiment, 32 to 50 letters and digits, to continue it.
        mode: "get" continues the experiment of that key, "create" starts one, "get_or_create" does whichever is
            possible.
        online: whether to send at once; False keeps it on disk, for `comet upload`.
        directory: of what is kept on disk.
        api_key: who sends; better kept in the environment, `COMET_API_KEY`.
        every: calls between two events of a metric.

    Needs the package comet-ml, which the extra `comet` brings. Raises `FdsError` where it is missing, and for
    arguments of another kind.
    """

    @checked_call
    def __init__(
        self,
        project: str | None = None,
        *,
        workspace: str | None = None,
        name: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get", "create", "get_or_create"] | None = None,
        online: bool | None = None,
        directory: str | Path | None = None,
        api_key: str | None = None,
        every: int = 1,
    ):
        self.every = check_every(every, "Comet")
        key = {"experiment_key": experiment_key, "api_key": api_key}
        texts = check_texts("Comet", project=project, workspace=workspace, **key)
        check_mode(mode, ("get", "create", "get_or_create"), "Comet")
        if not isinstance(online, bool | None):
            raise FdsError("neither true nor false", where="Comet, online", got=repr(online), want="a bool or None")
        require("comet_ml", "comet", "Comet")
        self._options = {**texts, "mode": mode, "online": online}
        where = None if directory is None else check_path(directory, "Comet, directory")
        self._config = check_texts("Comet", name=name) | {"offline_directory": where}
        self._experiment: Any = None

    def __repr__(self) -> str:
        return f"Comet({self._options['project']!r})"

    def write(self, events: Sequence[Event]) -> None:
        """Log the events together."""
        if self._experiment is None:
            import comet_ml  # pyright: ignore[reportMissingImports]

            config = comet_ml.ExperimentConfig(**self._config)
            self._experiment = comet_ml.start(**self._options, experiment_config=config)
        self._experiment.log_metrics({event.tag: event.value for event in events}, step=int(events[0].x))

    def close(self) -> None:
        """End the experiment."""
        if self._experiment is not None:
            self._experiment.end()
