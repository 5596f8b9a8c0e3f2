"""What pytest does differently as a part of a run on a GPU: it records each test at once, and goes on behind it later.

A test that hangs ends its worker, and so does one after which CUDA is broken: pytest-xdist starts another.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import testing
from benchmarks.gpu.records import ERROR, FAILED, NO_TIME, PASSED, WRONG, Record, Records
from benchmarks.gpu.worker import AGAIN, LISTED, end_with_parent, is_broken

PART = os.environ.get(testing.PART, testing.OTHERS)


def pytest_configure(config):
    end_with_parent()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(), "fds-gpu-recorder")


def pytest_collection_modifyitems(config, items):
    """Leave out what passed in earlier calls and what was tried in this one; what failed before comes last."""
    records, begun = Records(Path(os.environ[testing.OUT])), float(os.environ[testing.NOW])
    before = [r for r in records.records if r.part == PART and r.at < begun]  # the same for every worker
    over = {r.case for r in before if r.status == PASSED or (r.call == records.call and r.status != NO_TIME)}
    failed = {r.case for r in before if r.status in WRONG}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in over])
    items[:] = sorted((item for item in items if item.nodeid not in over), key=lambda item: item.nodeid in failed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """End the process where a test takes too long, or has broken CUDA."""
    faulthandler.dump_traceback_later(float(os.environ[testing.LIMIT]), exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if hasattr(item.config, "workerinput") and is_broken():
            print(f"tests: {item.nodeid} broke CUDA in this process", file=sys.__stderr__, flush=True)
            os._exit(AGAIN)


class Recorder:
    """Records what came of each test, in the process that the workers report to."""

    def __init__(self):
        self.records, self.until = Records(Path(os.environ[testing.OUT])), float(os.environ[testing.UNTIL])
        self.seconds, self.errors, self.over, self.listed = {}, {}, set(), False

    def pytest_xdist_node_collection_finished(self, node, ids):
        if not self.listed:
            self.listed = True
            self.records.add(Record(PART, LISTED, PASSED, figures={"left": list(ids)}))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report):
        name = report.nodeid
        if name in self.over:  # the end of a worker that a test has broken
            return
        self.seconds[name] = self.seconds.get(name, 0.0) + getattr(report, "duration", 0.0)
        if report.failed or (report.skipped and not hasattr(report, "wasxfail")):
            self.errors.setdefault(name, f"{'skipped: ' * report.skipped}{report.longreprtext or report.longrepr}")
        if report.when not in ("setup", "call"):  # "teardown", or "???" where the worker ended
            crashed = report.when != "teardown"
            status = ERROR if crashed else FAILED if name in self.errors else PASSED
            self.over.add(name)
            seconds = round(self.seconds[name], 3)
            self.records.add(Record(PART, name, status, seconds, error=self.errors.get(name, "")))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid):
        self._stop_in_time()

    def pytest_sessionstart(self, session):
        self.session = session

    def _stop_in_time(self):
        if time.time() > self.until:
            self.session.shouldstop = "no time left"

    def pytest_collectreport(self, report):
        if report.failed:
            self.records.add(Record(PART, report.nodeid, ERROR, error=report.longreprtext))
