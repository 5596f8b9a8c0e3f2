"""`report`: the page of a run, or of several beside each other."""

from __future__ import annotations

import os
from pathlib import Path

from fds.errors import FdsError, checked_call, expanded, is_a
from fds.reporting.page import page
from fds.reporting.run import read_run

NAME = "report.html"


@checked_call
def report(*runs: str | Path, path: str | Path | None = None) -> Path:
    """Write one HTML file about a run, or about several beside each other, and return its path.

        fds.report("runs/one")                           # runs/one/report.html
        fds.report("runs/one", "runs/two", path="both.html")

    It is made from what lies in the runs' directories: files of the sinks `JSONL` and `CSV`, the log of
    `fds.display.Progress`, `run.json` of `fds.record_run`, traces of `fds.trace`, and saves, also one folder below.
    What is missing is left out; what cannot be read is named on the page. The file needs no server and no network.

    Args:
        runs: directories, one for each run.
        path: of the file; None for `report.html` in the run's directory, or here for several.

    Raises `FdsError` for a directory that holds nothing of a run, and a file that cannot be written.
    """
    if not runs or not all(is_a(run, str | Path) for run in runs):
        raise FdsError("not runs", where="report", got=repr(runs)[:80], want='fds.report("runs/one")')
    if not is_a(path, str | Path | None):
        raise FdsError("not a path", where="report, path", got=repr(path)[:80], want='"report.html", or None')
    folders = [Path(expanded(run)) for run in runs]
    read = [read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    target = Path(expanded(path)) if path is not None else (folders[0] if len(folders) == 1 else Path()) / NAME
    try:
        target.write_bytes(page(read).encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise FdsError("the page cannot be written", where=str(target), got=str(error)) from None
    return target


def _names(folders: list[Path]) -> list[str]:
    """Return the shortest ends of paths that differ; numbers where they are the same."""
    whole = [Path(os.path.abspath(folder)).parts for folder in folders]
    for length in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len({*names}) == len(names):
            return names
    return [f"{folder} ({number})" for number, folder in enumerate(folders, 1)]
