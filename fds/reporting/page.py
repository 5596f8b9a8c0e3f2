"""`report`: the page of a run, or of several: one HTML file with its sections, style, program and numbers inside."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

import attrs
import numpy as np

from fds import _html
from fds.errors import FdsError, checked_call, expanded, is_a
from fds.reporting.charts import MOST_CHARTS, Chart, charts, data, parts, picture
from fds.reporting.findings import UNKNOWN, Finding, differences, figures, findings, flat, side_by_side, timeline
from fds.reporting.run import Run, Table, read_run
from fds.reporting.series import CURVES, MEMORY, MESSAGES, PARTS, SPEED, TIME

MOST_TEXT = 200_000  # characters of a text
MOST_FINDINGS = 100


class Html(str):
    """Text that is HTML."""


def html(text: str) -> str:
    """Return text as HTML; of a long one the beginning."""
    if isinstance(text, Html):
        return text
    more = f"\n... of {len(text):,} characters" * (len(text) > MOST_TEXT)
    return escape(text[:MOST_TEXT] + more)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = False) -> str:
    """Return a table whose first column names its rows; empty without rows.

    Args:
        head: above the columns, or nothing.
        rows: of cells, the first `_html.MOST` of which are shown.
        numbers: whether the other columns are aligned right, as numbers are.
    """
    rows = list(rows)
    if not rows:
        return ""
    above = "".join(f'<th scope="col">{html(name)}</th>' if name else "<td></td>" for name in head)
    lines = "".join(
        f'<tr><th scope="row">{html(row[0])}</th>{"".join(f"<td>{html(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows[: _html.MOST]
    )
    more = _html.text(f"and {len(rows) - _html.MOST:,} more") if len(rows) > _html.MOST else ""
    kind = ' class="numbers"' * numbers
    return (
        f'<div class="scrolls"><table{kind}><thead><tr>{above}</tr></thead><tbody>{lines}</tbody></table></div>{more}'
    )


def pairs(rows: Iterable[tuple[str, str]], kind: str) -> str:
    """Return names and texts, in as many columns as fit: `kind` is "cards" or "options". Empty without rows."""
    lines = "".join(f"<div><dt>{html(name)}</dt><dd>{html(text)}</dd></div>" for name, text in rows)
    return f'<dl class="{kind}">{lines}</dl>' if lines else ""


def fold(title: str, text: str, *, opened: bool = False) -> str:
    """Return a text as it is, under a title that opens it; empty without a text."""
    inside = text if isinstance(text, Html) else f'<pre tabindex="0">{html(text)}</pre>'
    return f"<details{' open' * opened}><summary>{html(title)}</summary>{inside}</details>" if text else ""


def bar(amounts: Mapping[str, tuple[float, str]], show: Callable[[float], str], head: str) -> str:
    """Return amounts that add up, each with its colour, as one bar and a table with their shares; empty for nothing."""
    whole = sum(amount for amount, _ in amounts.values())
    if not whole > 0:
        return ""
    pieces = "".join(
        f'<i style="flex-grow:{amount / whole:.4f};background:{color}" title="{html(f"{name}: {show(amount)}")}"></i>'
        for name, (amount, color) in amounts.items()
        if amount > 0
    )
    rows = [(swatch(name, color), show(amount), f"{amount / whole:.1%}") for name, (amount, color) in amounts.items()]
    drawn = f'<div class="bar" aria-hidden="true">{pieces}</div>'
    return drawn + table(("", head, "share"), [*rows, ("all", show(whole), "")], numbers=True)


def swatch(name: str, color: str) -> Html:
    """Return a name beside its colour."""
    return Html(f'<i class="swatch" style="background:{color}"></i>{html(name)}')


@attrs.frozen(eq=False)
class Page:
    """What the page shows.

    Attributes:
        runs: as they were read.
        findings: remarks on each run.
        charts: in the order in which the page's program has them.
    """

    runs: Sequence[Run]
    findings: Sequence[Sequence[Finding]]
    charts: Sequence[Chart]

    def each(self, write: Callable[[Run], str]) -> str:
        """Return what is written of each run, under its name if there are several."""
        several = len(self.runs) > 1
        texts = ((self.name(index) if several else "", write(run)) for index, run in enumerate(self.runs))
        return "".join(f"<h3>{name}</h3>" * bool(name) + inside for name, inside in texts if inside)

    def name(self, index: int) -> Html:
        """Return the name of a run beside its colour."""
        return swatch(self.runs[index].name, f"var(--run{index % 8})")  # follows the page's scheme


def sections(page: Page) -> Iterator[tuple[str, str, str]]:
    """Yield the anchor, the title and the HTML of each section that is not empty."""
    for anchor, title, write in (
        ("glance", "At a glance", _glance),
        ("findings", "Worth a look", _findings),
        ("curves", "Curves", lambda page: _charts(page, CURVES)),
        ("speed", "Throughput", lambda page: _charts(page, SPEED)),
        ("time", "Time of a call", _time),
        ("memory", "Memory", lambda page: page.each(_bytes) + _charts(page, MEMORY)),
        ("messages", "Messages", lambda page: page.each(_messages) + _charts(page, MESSAGES)),
        ("timeline", "Who runs when", lambda page: page.each(_lanes)),
        ("differences", "What differs", _differences),
        ("configuration", "Configuration", lambda page: page.each(_configuration)),
        ("environment", "Environment", lambda page: page.each(_environment)),
        ("files", "Files", lambda page: page.each(_files)),
    ):
        if inside := write(page):
            yield anchor, title, inside


def _glance(page: Page) -> str:
    columns = [figures(run) for run in page.runs]
    if len(columns) == 1:
        return pairs(columns[0].items(), "cards")
    return table(("", *map(page.name, range(len(columns)))), side_by_side(columns), numbers=True)


def _findings(page: Page) -> str:
    at = {
        line.label: index
        for index, chart in enumerate(page.charts[:MOST_CHARTS])
        for line in chart.lines
        if not chart.stacked
    }
    lines: list[str] = []
    for run, remarks in enumerate(page.findings):
        of = f"{page.name(run)}: " if len(page.runs) > 1 else ""
        for finding in remarks:
            words = html(finding.what)
            link = f'<a href="#chart{at[finding.metric]}">{words}</a>' if finding.metric in at else words
            lines.append(f'<li class="{finding.level}"><b>{finding.level}</b> <span>{of}{link}</span></li>')
    axes = {series.axis for run in page.runs for series in run.series.values()}
    if len(axes) > 1:
        words = f"metrics are logged by {' and by '.join(sorted(axes))}, so that curves do not lie over one axis"
        lines.append(f'<li class="note"><b>note</b> <span>{words}</span></li>')
    more = f"<li>and {len(lines) - MOST_FINDINGS} more</li>" * (len(lines) > MOST_FINDINGS)
    nothing = "<p>Nothing stands out: losses are finite and do not jump, and no step was skipped.</p>"
    return f'<ul class="findings">{"".join(lines[:MOST_FINDINGS])}{more}</ul>' if lines else nothing


def _charts(page: Page, section: str) -> str:
    """Return the charts of a section; those of a group, such as `lr/*`, are folded away, but not messages."""
    groups: dict[str, list[str]] = {"": []}
    for index, chart in enumerate(page.charts):
        if chart.kind.section == section and not chart.stacked:
            groups.setdefault("" if section == MESSAGES else chart.group, []).append(_figure(page, index))
    laid = {
        group: Html(f'<div class="charts">{"".join(figures)}</div>') for group, figures in groups.items() if figures
    }
    return "".join(
        fold(f"{group} ({len(groups[group])})", content) if group else content for group, content in laid.items()
    )


def _figure(page: Page, index: int) -> str:
    """Return the place of a chart, which the page's program draws."""
    chart = page.charts[index]
    title = html(chart.title)
    if index >= MOST_CHARTS:
        return f"<p>{title}: not drawn, as all after the first {MOST_CHARTS} charts</p>"
    return (
        f'<figure id="chart{index}" data-chart="{index}"><figcaption><b>{title}</b>'
        f'<button class="widen" type="button" aria-pressed="false" aria-label="draw {title} wide">⤢</button>'
        f'</figcaption><div class="plot" tabindex="0" role="img" aria-label="{html(chart.summary(page.runs))}"></div>'
        f'<div class="readout"></div></figure>'
    )


def _time(page: Page) -> str:
    """Return the parts of a call of each run: their means, and beside them their course."""
    inside = ""
    for index, chart in enumerate(page.charts):
        if chart.stacked:
            run = chart.lines[0].run
            name = f"<h3>{page.name(run)}</h3>" * (len(page.runs) > 1)
            inside += f'{name}<div class="charts"><div>{_parts(page.runs[run])}</div>{_figure(page, index)}</div>'
    return inside + _charts(page, TIME)


def _parts(run: Run) -> str:
    latest = {part: [*run.by_topology(series).values()][-1] for part, series in parts(run).items()}
    means = {part: float(np.nanmean(series.y)) for part, series in latest.items() if np.isfinite(series.y).any()}
    return bar({part: (ms, PARTS[part][1]) for part, ms in means.items()}, lambda ms: f"{ms:,.2f} ms", "mean")


_COLORS = ("#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#d55e00", "#8c6d31", "#999999", "#7a8fd6")  # of bytes


def _bytes(run: Run) -> str:
    sizes = [(name, n) for name, n in run.record.num_bytes.items() if n > 0]
    amounts = {name: (float(n), _COLORS[i % len(_COLORS)]) for i, (name, n) in enumerate(sizes)}
    title = _html.text("What the first rank holds, by the account of its step:") if sizes else ""
    places = [(place, _html.num_bytes(n)) for place, n in run.record.places.items()]
    where = _html.text("Of the state, where it lives between steps:") if places else ""
    return title + bar(amounts, lambda n: _html.num_bytes(int(n)), "bytes") + where + table((), places, numbers=True)


def _messages(run: Run) -> str:
    rows = [(station, _html.num_bytes(n)) for station, n in run.record.sent.items() if n]
    title = _html.text("What a rank sends in a step, predicted from its composition:") if rows else ""
    return title + table((), rows, numbers=True) + ("" if run.messages is None else _messages_seen(run.messages))


def _messages_seen(messages: Table) -> str:
    size = lambda n: UNKNOWN if n is None else _html.num_bytes(n)
    rows = [
        (
            f"{row.what or 'other'}: {row.op} of {size(row.num_bytes) if row.num_bytes else 'texts'} on {row.axis}",
            f"{row.count:,}",
            UNKNOWN if row.predicted_count is None else f"{row.predicted_count:,}",
            size(row.bytes_sent),
            size(row.predicted_bytes),
            f"{row.latency_ms / row.timed:,.3f} ms" if row.timed else UNKNOWN,
            f"{row.waited_ms / row.timed:,.3f} ms" if row.timed else UNKNOWN,
            UNKNOWN if row.bus_gb_per_s is None else f"{row.bus_gb_per_s:,.3g} GB/s",
        )
        for row in messages.rows
    ]
    ranks = [(f"rank {x.rank}", f"{x.waited_ms:,.1f} ms", f"{x.for_others_ms:,.1f} ms") for x in messages.ranks]
    head = ("", "number", "predicted", "sent", "predicted", "latency", "waited", "bus")
    title = _html.text(f"What the first rank sent in {messages.calls:,} calls that were watched:")
    whom = _html.text("How long ranks waited; those for which the others wait have the least:") if ranks else ""
    tables = table(head, rows, numbers=True) + whom + table(("", "waited", "for others"), ranks, numbers=True)
    return title + tables


def _lanes(run: Run) -> str:
    """Return the plan of a run's pipeline, and its traces."""
    inside = ""
    if run.record.plan:
        title = f"The plan of the pipeline, {run.record.schedule}, as if all stages cost the same"
        if (line := timeline(run)) is None:
            inside = _html.text(f"{title}: too large to be simulated here, or not readable.")
        else:
            inside = f'{_html.text(f"{title}:")}<div class="lanes" tabindex="0">{line._repr_html_()}</div>'
    for file, slices in run.traces.items():
        title = _html.text(f"A call as it ran on each rank, by {file}:")
        inside += f'{title}<div class="lanes" tabindex="0">{picture(slices)}</div>'
    return inside


def _differences(page: Page) -> str:
    if len(page.runs) < 2:
        return ""
    nothing = "<p>By what they say of themselves the runs differ in nothing.</p>"
    return table(("", *map(page.name, range(len(page.runs)))), differences(page.runs)) or nothing


def _configuration(run: Run) -> str:
    options = pairs(flat(run.record.configuration), "options")
    came_to = fold("What it came to", run.record.explain, opened=True)
    return options + came_to + fold("The step in words", run.record.describe, opened=True)


def _environment(run: Run) -> str:
    rows = [*run.record.environment.items()]
    for i, start in enumerate(run.record.starts):
        words = filter(None, (_moment(start.at), f"at call {start.calls:,}", start.topology))
        rows.append(("started" if i == 0 else "went on", ", ".join(words)))
    return pairs(rows, "options")


def _files(run: Run) -> str:
    saves = [
        (x.name, f"{x.calls:,}", _html.num_bytes(x.num_bytes), _moment(x.saved), ", ".join(x.composition))
        for x in run.saves
    ]
    failed = table(("not read", "why"), list(run.unreadable.items()))
    read = fold(f"files that were read ({len(run.files)})", "\n".join([f"in {run.path}:", *run.files]))
    return table(("save", "calls", "bytes", "saved", "composition"), saves) + failed + read


def _moment(iso: str) -> str:
    return f"{iso[:19].replace('T', ' ')} UTC"


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def write_page(runs: Sequence[Run]) -> str:
    """Return the page of runs, which asks no other file and no network for anything."""
    remarks = [findings(run) for run in runs]
    page = Page(runs, remarks, charts(runs, remarks))
    shown = list(sections(page))
    title = " and ".join(run.name for run in runs[:3]) + " and others" * (len(runs) > 3)
    links = "".join(f'<a href="#{anchor}">{escape(name)}</a>' for anchor, name, _ in shown)
    body = "".join(f'<section id="{anchor}"><h2>{escape(name)}</h2>{text}</section>' for anchor, name, text in shown)
    style, program = (Path(__file__).with_suffix(suffix).read_text() for suffix in (".css", ".js"))
    numbers = json.dumps(data(runs, page.charts[:MOST_CHARTS]), separators=(",", ":"), allow_nan=False)
    # ends no element of HTML
    numbers = numbers.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="generator" content="fds report">
<link rel="icon" href="data:,">
<title>{escape(title)} · fds</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">to the content</a>
<header><h1>{escape(title)}</h1><button id="theme" type="button">dark</button></header>
<nav aria-label="sections">{links}</nav>
{_controls(page)}
<main id="main">{body}</main>
<noscript>Curves are drawn by a program in this page, which needs JavaScript; all else is here.</noscript>
<script type="application/json" id="data">{numbers}</script>
<script>{program}</script>
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
