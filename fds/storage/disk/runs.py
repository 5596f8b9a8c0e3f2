"""Which run the saves of a directory are of: two runs that save into one by turns would remove each other's.

A run's id is in its manifests. A process remembers by directory which run it began or loaded there, and goes on with
that one alone: a job that is started again loads first, and then is the same run.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from fds.errors import StorageError
from fds.storage.disk.folders import latest_known
from fds.storage.format.manifest import read_manifest, run_of

_runs: dict[str, str] = {}  # by directory, its links followed


def remembered(dir: Path) -> str | None:
    """Return the id of the run that this process began or loaded in a directory."""
    return _runs.get(os.path.realpath(dir))


def remember(dir: Path, run: str) -> None:
    """Go on with a run in a directory."""
    _runs[os.path.realpath(dir)] = run


def run_to_save(dir: Path) -> str:
    """Return the id of the run that this process goes on with in a directory, or else of one that begins."""
    return remembered(dir) or uuid.uuid4().hex


def last_run(dir: Path) -> str | None:
    """Return the id of the run that saved last in a directory, None where there is none or an older version saved."""
    return run_of(dir / latest_known(dir))


def check_save(dir: Path, run: str) -> None:
    """Raise `StorageError` where the last save of a directory is of another run than the one that is to save."""
    if (other := last_run(dir)) not in (None, run):
        raise StorageError(
            "another run has saved here",
            where=str(dir),
            got=_described(dir / latest_known(dir), other),
            want="the run that this process began or loaded here",
            hint="fds.load from here first to go on with that run; else another directory, or take_over=True",
        )


def check_load(dir: Path, folder: Path, run: str | None) -> None:
    """Raise `StorageError` for a save of another run than the one that this process goes on with in a directory."""
    mine = remembered(dir)
    if None not in (mine, run) and mine != run:
        raise StorageError(
            "this save is of another run than the one that this process began or loaded here",
            where=str(folder),
            got=_described(folder, run),
            want=f"run {mine}",
            hint="give each run a directory of its own; take_over=True goes on with this one all the same",
        )


def _described(folder: Path, run: str | None) -> str:
    """Return which save of which run a folder has, when it was written, and what composed its step."""
    with contextlib.suppress(StorageError):
        manifest = read_manifest(folder)
        composed = ", ".join(manifest.composition)
        return f"{folder.name} of run {run}, saved {manifest.saved}, compose({composed:.200})"
    return f"{folder.name} of run {run}"
