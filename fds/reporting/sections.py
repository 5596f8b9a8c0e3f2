"""The sections of the page: each is HTML, or nothing where the runs left nothing for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np

from fds import _html
from fds.reporting.charts import MOST_CHARTS, Chart, parts
from fds.reporting.figures import UNKNOWN, differences, figures, flat
from fds.reporting.findings import Finding, timeline
from fds.reporting.lanes import picture
from fds.reporting.markup import Html, bar, folded, html, pairs, run_color, swatch, table
from fds.reporting.messages import Table
from fds.reporting.metrics import CURVES, MEMORY, MESSAGES, PARTS, SPEED, TIME
from fds.reporting.run import Run

MOST_FINDINGS = 100


@attrs.frozen(eq=False)
class Told:
    """All that the page tells.

    Attributes:
        runs: as they were read.
        found: remarks on each.
        charts: in the order in which the page's program has them.
    """

    runs: Sequence[Run]
    found: Sequence[Sequence[Finding]]
    charts: Sequence[Chart]

    def each(self, tell: Callable[[Run], str]) -> str:
        """Return what is told of each run, under its name if there are several."""
        several = len(self.runs) > 1
        told = ((self.name(index) if several else "", tell(run)) for index, run in enumerate(self.runs))
        return "".join(f"<h3>{name}</h3>" * bool(name) + inside for name, inside in told if inside)

    def name(self, index: int) -> Html:
        """Return the name of a run beside its colour."""
        return swatch(self.runs[index].name, run_color(index))


def sections(told: Told) -> Iterator[tuple[str, str, str]]:
    """Yield the anchor, the title and the HTML of each section that has something to tell."""
    for anchor, title, tell in (
        ("glance", "At a glance", _glance),
        ("findings", "Worth a look", _findings),
        ("curves", "Curves", lambda told: _charts(told, CURVES)),
        ("speed", "Throughput", lambda told: _charts(told, SPEED)),
        ("time", "Time of a call", _time),
        ("memory", "Memory", lambda told: told.each(_bytes) + _charts(told, MEMORY)),
        ("messages", "Messages", lambda told: told.each(_messages) + _charts(told, MESSAGES)),
        ("timeline", "Who runs when", lambda told: told.each(lambda run: _planned(run) + _traced(run))),
        ("differences", "What differs", _differences),
        ("configuration", "Configuration", lambda told: told.each(_configuration)),
        ("environment", "Environment", lambda told: told.each(_environment)),
        ("files", "Files", lambda told: told.each(_files)),
    ):
        if inside := tell(told):
            yield anchor, title, inside


def _glance(told: Told) -> str:
    every = [figures(run) for run in told.runs]
    if len(every) == 1:
        return pairs(every[0].items(), "cards")
    names = dict.fromkeys(name for one in every for name in one)
    rows = [(name, *(one.get(name, UNKNOWN) for one in every)) for name in names]
    return table(("", *map(told.name, range(len(every)))), rows, numbers=True)


def _findings(told: Told) -> str:
    at = {
        line.label: index
        for index, chart in enumerate(told.charts[:MOST_CHARTS])
        for line in chart.lines
        if not chart.stacked
    }
    lines: list[str] = []
    for run, found in enumerate(told.found):
        of = f"{told.name(run)}: " if len(told.runs) > 1 else ""
        for one in found:
            words = html(one.what)
            link = f'<a href="#chart{at[one.metric]}">{words}</a>' if one.metric in at else words
            lines.append(f'<li class="{one.level}"><b>{one.level}</b> <span>{of}{link}</span></li>')
    axes = {series.axis for run in told.runs for series in run.series.values()}
    if len(axes) > 1:
        words = f"metrics are logged by {' and by '.join(sorted(axes))}, so that curves do not lie over one axis"
        lines.append(f'<li class="note"><b>note</b> <span>{words}</span></li>')
    more = f"<li>and {len(lines) - MOST_FINDINGS} more</li>" * (len(lines) > MOST_FINDINGS)
    nothing = "<p>Nothing stands out: losses are finite and do not jump, and no step was skipped.</p>"
    return f'<ul class="findings">{"".join(lines[:MOST_FINDINGS])}{more}</ul>' if lines else nothing


def _charts(told: Told, section: str) -> str:
    """Return the charts of a section; those of a group, such as `lr/*`, are folded away, but not messages."""
    groups: dict[str, list[str]] = {"": []}
    for index, chart in enumerate(told.charts):
        if chart.kind.section == section and not chart.stacked:
            groups.setdefault("" if section == MESSAGES else chart.group, []).append(_figure(told, index))
    laid = {group: Html(f'<div class="charts">{"".join(some)}</div>') for group, some in groups.items() if some}
    return "".join(folded(f"{group} ({len(groups[group])})", some) if group else some for group, some in laid.items())


def _figure(told: Told, index: int) -> str:
    """Return the place of a chart, which the page's program draws."""
    chart = told.charts[index]
    title = html(chart.title)
    if index >= MOST_CHARTS:
        return f"<p>{title}: not drawn, as all after the first {MOST_CHARTS} charts</p>"
    return (
        f'<figure id="chart{index}" data-chart="{index}"><figcaption><b>{title}</b>'
        f'<button class="widen" type="button" aria-pressed="false" aria-label="draw {title} wide">⤢</button>'
        f'</figcaption><div class="plot" tabindex="0" role="img" aria-label="{html(chart.summary(told.runs))}"></div>'
        f'<div class="readout"></div></figure>'
    )


def _time(told: Told) -> str:
    """Return the parts of a call of each run: their means, and beside them their course."""
    inside = ""
    for index, chart in enumerate(told.charts):
        if chart.stacked:
            run = chart.lines[0].run
            name = f"<h3>{told.name(run)}</h3>" * (len(told.runs) > 1)
            inside += f'{name}<div class="charts"><div>{_parts(told.runs[run])}</div>{_figure(told, index)}</div>'
    return inside + _charts(told, TIME)


def _parts(run: Run) -> str:
    latest = {part: [*run.by_topology(series).values()][-1] for part, series in parts(run).items()}
    means = {part: float(np.nanmean(series.y)) for part, series in latest.items() if np.isfinite(series.y).any()}
    return bar({part: (ms, PARTS[part][1]) for part, ms in means.items()}, lambda ms: f"{ms:,.2f} ms", "mean")


_COLORS = ("#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#d55e00", "#8c6d31", "#999999", "#7a8fd6")  # of bytes


def _bytes(run: Run) -> str:
    held = [(name, n) for name, n in run.record.num_bytes.items() if n > 0]
    amounts = {name: (float(n), _COLORS[i % len(_COLORS)]) for i, (name, n) in enumerate(held)}
    said = _html.text("What the first rank holds, by the account of its step:") if held else ""
    places = [(place, _html.num_bytes(n)) for place, n in run.record.places.items()]
    where = _html.text("Of the state, where it lives between steps:") if places else ""
    return said + bar(amounts, lambda n: _html.num_bytes(int(n)), "bytes") + where + table((), places, numbers=True)


def _messages(run: Run) -> str:
    rows = [(station, _html.num_bytes(n)) for station, n in run.record.sent.items() if n]
    said = _html.text("What a rank sends in a step, predicted from its composition:") if rows else ""
    return said + table((), rows, numbers=True) + ("" if run.messages is None else _watched(run.messages))


def _watched(messages: Table) -> str:
    """Return messages as they were watched: by kind, and by rank."""
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
    ranks = [(f"rank {it.rank}", f"{it.waited_ms:,.1f} ms", f"{it.for_others_ms:,.1f} ms") for it in messages.ranks]
    head = ("", "number", "predicted", "sent", "predicted", "latency", "waited", "bus")
    said = _html.text(f"What the first rank sent in {messages.calls:,} calls that were watched:")
    whom = _html.text("How long ranks waited; those for which the others wait have the least:") if ranks else ""
    tables = table(head, rows, numbers=True) + whom + table(("", "waited", "for others"), ranks, numbers=True)
    return said + tables


def _planned(run: Run) -> str:
    if not run.record.plan:
        return ""
    line = timeline(run)
    said = f"The plan of the pipeline, {run.record.schedule}, as if all stages cost the same"
    if line is None:
        return _html.text(f"{said}: too large to be simulated here, or not readable.")
    return f'{_html.text(said + ":")}<div class="lanes" tabindex="0">{line._repr_html_()}</div>'


def _traced(run: Run) -> str:
    said = "A call as it ran on each rank, by"
    return "".join(
        f'{_html.text(f"{said} {file}:")}<div class="lanes" tabindex="0">{picture(events)}</div>'
        for file, events in run.traces.items()
    )


def _differences(told: Told) -> str:
    if len(told.runs) < 2:
        return ""
    nothing = "<p>By what they say of themselves the runs differ in nothing.</p>"
    return table(("", *map(told.name, range(len(told.runs)))), differences(told.runs)) or nothing


def _configuration(run: Run) -> str:
    options = pairs(flat(run.record.configuration), "options")
    came_to = folded("What it came to", run.record.explain, opened=True)
    return options + came_to + folded("The step in words", run.record.describe, opened=True)


def _environment(run: Run) -> str:
    starts = [
        ", ".join(filter(None, (moment(start.at), f"at call {start.calls:,}", start.topology)))
        for start in run.record.starts
    ]
    went_on = (("started" if i == 0 else "went on", start) for i, start in enumerate(starts))
    return pairs([*run.record.environment.items(), *went_on], "options")


def _files(run: Run) -> str:
    saves = [
        (save.name, f"{save.calls:,}", _html.num_bytes(save.num_bytes), moment(save.saved), ", ".join(save.composition))
        for save in run.saves
    ]
    failed = table(("not read", "why"), list(run.unreadable.items()))
    read = folded(f"files that were read ({len(run.files)})", "\n".join([f"in {run.path}:", *run.files]))
    return table(("save", "calls", "bytes", "saved", "composition"), saves) + failed + read


def moment(iso: str) -> str:
    """Return a time in UTC for people, to the second."""
    return f"{iso[:19].replace('T', ' ')} UTC"
