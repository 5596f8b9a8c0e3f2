"""The files of a run: what its records come to, for machines, for people, and for what reads junit."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import attrs

from benchmarks.gpu import testing
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.records import ERROR, FAILED, NO_TIME, PASSED, WRONG, Record, Records, counted
from benchmarks.gpu.worker import LISTED

RESULTS, PAGE, TESTS = "results.json", "results.md", "tests.xml"
Rows = tuple[str, list[str], list[list[str]]]  # a title, a header, and rows of as many cells


def cases_of(records: Records, part: str) -> list[Record]:
    """Return what came last of each case of a part; what is in parentheses, as a listing that passed, is none."""
    return [r for r in records.latest(part).values() if not (r.case.startswith("(") and r.status == PASSED)]


def write(records: Records) -> None:
    """Write all files beside the records; each is whole at every instant."""
    folder = records.path.parent
    parts = {part: cases_of(records, part) for part in PARTS}
    calls = [{**head["head"], "at": head["at"]} for head in records.heads]
    found = {"calls": calls, "parts": {part: [attrs.asdict(r) for r in some] for part, some in parts.items()}}
    _replace(folder / RESULTS, json.dumps(found, indent=1, default=str))
    _replace(folder / PAGE, page(records, parts))
    _replace(folder / TESTS, junit(r for part in testing.PARTS for r in parts[part]))


def page(records: Records, parts: dict[str, list[Record]]) -> str:
    """Return the page for people: what ran, how many of what, what failed, and the tables of each part."""
    lines = ["# fds on a GPU", ""]
    for head in records.heads:
        moment = datetime.datetime.fromtimestamp(head["at"], datetime.UTC)
        lines.append(f"- call {head['call']}, {moment:%Y-%m-%d %H:%M} UTC: " + _facts(head["head"]))
    statuses = [PASSED, FAILED, ERROR, NO_TIME]
    rows = [[part, *(str(counted(some).get(s, 0)) for s in statuses)] for part, some in parts.items() if some]
    lines += _table("Cases", ["part", *statuses], rows)
    cases = [r for some in parts.values() for r in some]
    wrong = [[r.part, r.case, r.status, _last_words(r.error)] for r in cases if r.status in WRONG]
    if wrong:
        lines += _table("What failed, and its last words", ["part", "case", "status", "error"], wrong)
    if left := not_reached(cases):
        lines += ["", "## What was not reached", "", f"{left}. Call again."]
    states = [r for r in records.records if r.case.startswith("(the GPU")]
    if states:
        names = list(dict.fromkeys(name for r in states for name in r.figures))
        cells = [[str(r.call), r.part, r.case.strip("()"), *(str(r.figures.get(n, "")) for n in names)] for r in states]
        lines += _table("The GPU before and after each part", ["call", "part", "", *names], cells)
    for part, some in parts.items():
        for title, header, rows in tables_of(part, some):
            lines += _table(f"{part}: {title}", header, rows)
    return "\n".join(lines) + "\n"


def not_reached(records: Iterable[Record]) -> str:
    """Return how many cases of each part are left, in words, "" where none is."""
    left = [r for r in records if r.status == NO_TIME]
    known = Counter(r.part for r in left if r.case != LISTED)
    counts = [f"{n} of {part}" for part, n in known.items()]
    counts += [f"all of {r.part}" for r in left if r.case == LISTED]  # which could not yet say its cases
    return f"{known.total() or ''} cases left ({', '.join(counts)})".lstrip() if left else ""


def tables_of(part: str, records: list[Record]) -> list[Rows]:
    """Return the tables of a part: its module's own, or a row a case that has figures."""
    if not records or not PARTS[part].module:
        return []
    try:
        module = importlib.import_module(PARTS[part].module)
        if hasattr(module, "tables"):
            return module.tables(records)
    except Exception as error:  # a page without a table is better than no page
        return [
            (f"no table: {type(error).__name__}: {error}", ["case", "status"], [[r.case, r.status] for r in records])
        ]
    names = list(dict.fromkeys(name for r in records for name in r.figures))
    rows = [[r.case, r.status, f"{r.seconds:.1f}", *(_short(r.figures.get(n, "")) for n in names)] for r in records]
    return [("cases", ["case", "status", "seconds", *names], rows)]


def junit(records: Iterable[Record]) -> str:
    """Return the tests as junit's XML."""
    records = list(records)
    suite = ET.Element("testsuite", name="fds on a GPU", tests=str(len(records)))
    for status, name in ((FAILED, "failures"), (ERROR, "errors"), (NO_TIME, "skipped")):
        suite.set(name, str(counted(records).get(status, 0)))
    for r in records:
        file, _, name = r.case.partition("::")
        one = ET.SubElement(suite, "testcase", classname=file, name=name or file, time=f"{r.seconds:.3f}")
        if r.status != PASSED:
            kind = {FAILED: "failure", ERROR: "error"}.get(r.status, "skipped")
            ET.SubElement(one, kind, message=_last_words(r.error) or r.status).text = _printable(r.error)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True)


def _table(title: str, header: list[str], rows: list[list[str]]) -> list[str]:
    line = lambda cells: "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
    return ["", f"## {title}", "", line(header), line(["---"] * len(header)), *map(line, rows)]


def _facts(head: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in head.items() if not isinstance(value, dict))


def _last_words(text: str) -> str:
    """Return the first line that pytest marks as the error, which precedes what a law was given, or the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marked = [line.removeprefix("E").strip() for line in lines if line.startswith("E  ")]
    return _printable([*marked[:1], *lines[-1:], ""][0][:300])


def _printable(text: str) -> str:
    """Return a text without what XML cannot hold."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _replace(path: Path, text: str) -> None:
    """Write a file beside the one that is there, then put it in its place."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(text)
    os.replace(beside, path)
