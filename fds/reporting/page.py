"""`report`: the page of a run, or of several: one HTML file with its style, its program and its numbers inside."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fds.errors import FdsError, checked_call, expanded, is_a
from fds.reporting.charts import MOST_CHARTS, charts, data
from fds.reporting.findings import findings
from fds.reporting.run import Run, read_run
from fds.reporting.sections import Page, sections

_HERE = Path(__file__).parent
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_page(runs: Sequence[Run]) -> str:
    """Return the page of runs, which asks no other file and no network for anything."""
    remarks = [findings(run) for run in runs]
    page = Page(runs, remarks, charts(runs, remarks))
    shown = list(sections(page))
    title = " and ".join(run.name for run in runs[:3]) + " and others" * (len(runs) > 3)
    links = "".join(f'<a href="#{anchor}">{escape(name)}</a>' for anchor, name, _ in shown)
    body = "".join(f'<section id="{anchor}"><h2>{escape(name)}</h2>{html}</section>' for anchor, name, html in shown)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="generator" content="fds report">
<link rel="icon" href="data:,">
<title>{escape(title)} · fds</title>
<style>{(_HERE / "page.css").read_text()}</style>
</head>
<body>
<a class="skip" href="#main">to the content</a>
<header><h1>{escape(title)}</h1><button id="theme" type="button">dark</button></header>
<nav aria-label="sections">{links}</nav>
{_controls(page)}
<main id="main">{body}</main>
<noscript>Curves are drawn by a program in this page, which needs JavaScript; all else is here.</noscript>
<script type="application/json" id="data">{_embed(data(runs, page.charts[:MOST_CHARTS]))}</script>
<script>{(_HERE / "page.js").read_text()}</script>
</body>
</html>
"""


def _controls(page: Page) -> str:
    legend = "".join(
        f'<button type="button" class="run" data-run="{index}" aria-pressed="true">{page.name(index)}</button>'
        for index in range(len(page.runs) if len(page.runs) > 1 else 0)
    )
    axes = " or ".join(sorted({series.axis for run in page.runs for series in run.series.values()}))
    return (
        '<form id="controls" autocomplete="off" aria-label="how curves are drawn">'
        '<label>smoothing <input id="smoothing" type="range" min="0" max="0.99" step="0.01" value="0.6">'
        '<output id="smoothed" for="smoothing">0.60</output></label>'
        '<label>over <select id="over"><option value="x">'
        f'{axes or "steps"}</option><option value="t">time</option></select></label>'
        f'<label><input id="log" type="checkbox"> logarithmic</label><span class="runs">{legend}</span></form>'
    )


def _embed(value: Any) -> str:  # JSON that ends no element of HTML
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


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
    target = Path(expanded(path)) if path is not None else (folders[0] if len(folders) == 1 else Path()) / "report.html"
    try:
        target.write_bytes(write_page(read).encode("utf-8", "backslashreplace"))
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
