"""`Comet`: an experiment of Comet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fds.errors import FdsError, checked_call
from fds.monitors.sink import Event, checked_every, checked_path, checked_texts, needs

_MODES = ("get", "create", "get_or_create")


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
        self.every = checked_every(every, "Comet")
        self._options = checked_texts(
            "Comet", project=project, workspace=workspace, experiment_key=experiment_key, api_key=api_key
        )
        if mode is not None and mode not in _MODES:
            raise FdsError("no such mode", where="Comet, mode", got=repr(mode), want=", ".join(_MODES))
        if not isinstance(online, bool | None):
            raise FdsError("neither true nor false", where="Comet, online", got=repr(online), want="a bool or None")
        needs("comet_ml", "comet", "Comet")
        self._options |= {"mode": mode, "online": online}
        self._config = checked_texts("Comet", name=name) | {
            "offline_directory": None if directory is None else checked_path(directory, "Comet, directory")
        }
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
