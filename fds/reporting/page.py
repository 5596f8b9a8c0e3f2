"""The page: one HTML file with its style, its program and its numbers inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fds.reporting.charts import MOST_CHARTS, charts, data
from fds.reporting.findings import findings
from fds.reporting.run import Run
from fds.reporting.sections import Told, sections

_HERE = Path(__file__).parent
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(runs: Sequence[Run]) -> str:
    """Return the page of runs, which asks no other file and no network for anything."""
    found = [findings(run) for run in runs]
    drawn = charts(runs, found)
    told = Told(runs, found, drawn)
    shown = list(sections(told))
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
{_controls(told)}
<main id="main">{body}</main>
<noscript>Curves are drawn by a program in this page, which needs JavaScript; all else is here.</noscript>
<script type="application/json" id="data">{_embedded(data(runs, drawn[:MOST_CHARTS]))}</script>
<script>{(_HERE / "page.js").read_text()}</script>
</body>
</html>
"""


def _controls(told: Told) -> str:
    legend = "".join(
        f'<button type="button" class="run" data-run="{index}" aria-pressed="true">{told.name(index)}</button>'
        for index in range(len(told.runs) if len(told.runs) > 1 else 0)
    )
    axes = " or ".join(sorted({series.axis for run in told.runs for series in run.series.values()}))
    return (
        '<form id="controls" autocomplete="off" aria-label="how curves are drawn">'
        '<label>smoothing <input id="smoothing" type="range" min="0" max="0.99" step="0.01" value="0.6">'
        '<output id="smoothed" for="smoothing">0.60</output></label>'
        '<label>over <select id="over"><option value="x">'
        f'{axes or "steps"}</option><option value="t">time</option></select></label>'
        f'<label><input id="log" type="checkbox"> logarithmic</label><span class="runs">{legend}</span></form>'
    )


def _embedded(value: Any) -> str:
    """Return JSON that ends no element of HTML."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
