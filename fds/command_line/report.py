"""`fds report`: one page about a run, or about several beside each other."""

from __future__ import annotations

import argparse

from fds.command_line.parser import Parser
from fds.errors import escaped
from fds.reporting import report

Options = argparse.Namespace


def fill(parser: Parser) -> None:
    """Give the parser of `fds report` its options."""
    parser.teach(
        "Write one HTML file about a run: curves, speed, time and memory, messages, the pipeline, configuration,\n"
        "and what deserves a look. It needs no server and no network. Of several runs it shows the differences.",
        examples={
            "fds report runs/gpt": "writes runs/gpt/report.html",
            "fds report runs/a runs/b -o both.html": "two runs beside each other",
        },
        after="A run leaves what is shown by fds.monitor(fds.monitors.JSONL(...)), fds.timed and fds.record_run;\n"
        "`make train` does. docs/monitors.md is the guide.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the directory that a run was logged to")
    parser.add_argument("-o", "--output", metavar="FILE", help="of the page (report.html, in the run's directory)")
    parser.set_defaults(run=_report)


def _report(options: Options) -> int:
    print(escaped(str(report(*options.runs, path=options.output))))
    return 0
