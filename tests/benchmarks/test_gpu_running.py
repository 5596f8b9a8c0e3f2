"""A run on a GPU, unattended: no case takes the others with it, and what is done is on disk whatever happens."""

import argparse
import json
import os
import subprocess
import sys
import time
import types
import xml.etree.ElementTree as ET
from pathlib import Path

import attrs
import pytest

from benchmarks.gpu import merging, program, running, testing, worker
from benchmarks.gpu.needed import what_is_missing
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.records import ERROR, FAILED, NO_TIME, PASSED, Record, Records, counted
from benchmarks.gpu.worker import LISTED
from tests.programs import Program

PART = Part("counters", "cases of all kinds", 60.0, "tests.benchmarks.gpu_cases")


class Worker(Program):
    """A process of a part, forked from one that has imported torch, which takes a fresh interpreter 3 s."""

    def __init__(self, words, *, cwd, env, stdout, stderr, stdin, process_group):
        assert words[:3] == [sys.executable, "-m", "benchmarks.gpu.worker"] and stdout is stderr and process_group == 0
        log = Path(stdout.name)
        super().__init__(Path(worker.__file__), *words[3:], cwd=cwd, env=env, log=log, leads_session=True)


@pytest.fixture
def forked(monkeypatch):
    """Fork the processes of parts; a fresh one is in the rehearsal below."""
    theirs = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    monkeypatch.setattr(running, "subprocess", types.SimpleNamespace(Popen=Worker, **theirs))


def test_a_case_that_fails_hangs_or_crashes_leaves_the_others_alone_and_later_calls_go_on_behind_it(tmp_path, forked):
    call, records = running.Call(tmp_path, "cpu"), Records(tmp_path)
    records.begin({})
    running.run(call, PART, records, time.monotonic() + 300)
    latest = records.latest(PART.name)
    assert latest["passes"].figures == {"ms": 0.5}
    assert (latest["is wrong"].status, latest["is wrong"].figures) == (FAILED, {"apart": 0.1})
    assert latest["raises"].status == ERROR and "KeyError" in latest["raises"].error
    assert latest["hangs"].status == ERROR and "no end after 0.5 s" in latest["hangs"].error
    assert latest["crashes"].status == ERROR and "SIGSEGV" in latest["crashes"].error
    assert latest["breaks CUDA"].status == ERROR and "illegal memory access" in latest["breaks CUDA"].error
    assert latest["passes, after all of that"].status == PASSED
    assert "which is started anew" in (tmp_path / running.LOG).read_text()

    records.begin({})
    running.run(call, PART, records, time.monotonic())  # no time at all
    assert records.tried(PART.name) == set() and records.latest(PART.name)["hangs"].status == ERROR
    assert {r.case for r in records.records if r.call == 1 and r.status == PASSED} >= records.done(PART.name)


def test_a_part_that_cannot_say_its_cases_is_an_error_and_not_tried_for_ever(tmp_path, forked):
    records = Records(tmp_path)
    records.begin({})
    part = Part("counters", "a module that is not there", 60.0, "tests.benchmarks.no_such_module")
    running.run(running.Call(tmp_path, "cpu"), part, records, time.monotonic() + 300)
    (record,) = merging.cases_of(records, "counters")
    assert record.status == ERROR and "no_such_module" in record.error
    assert program.outcome(records, ["counters"]) == 1


def test_files_tell_what_the_records_come_to(tmp_path):
    records = Records(tmp_path)
    records.begin({"device": "cpu"})
    records.add(Record("tests", "tests/a.py::test_b[c]", FAILED, 0.5, error="assert 1 == 2\nE  \x1b[31mno"))
    records.add(Record("tests", "tests/a.py::test_d", PASSED, 0.25))
    records.add(Record("tests", "tests/a.py::test_e", NO_TIME, error="cut off: no time left"))
    records.add(Record("step", LISTED, NO_TIME))
    records.add(Record("counters", "memcheck, swiglu", PASSED, 3.0, {"summary": "0 errors"}))
    merging.write(records)
    suite = ET.parse(tmp_path / merging.TESTS).getroot()
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["3", "1", "0", "1"]
    assert [case.get("name") for case in suite] == ["test_b[c]", "test_d", "test_e"]
    parts = json.loads((tmp_path / merging.RESULTS).read_text())["parts"]
    assert {part: counted(Record(**r) for r in some) for part, some in parts.items() if some} == {
        "tests": {PASSED: 1, FAILED: 1, NO_TIME: 1},
        "counters": {PASSED: 1},
        "step": {NO_TIME: 1},
    }
    page = (tmp_path / merging.PAGE).read_text()
    assert "| tests | 1 | 1 | 0 | 1 |" in page and "memcheck, swiglu" in page and "0 errors" in page
    failed, left = page.split("## What failed")[1].split("## What was not reached")
    assert "test_b[c]" in failed and "test_e" not in failed
    assert left.startswith("\n\n1 cases left (1 of tests, all of step). Call again.")
    assert len(list(tmp_path.iterdir())) == 4  # with the log five: not more than come back from a machine


def test_the_time_of_a_part_is_counted_over_its_calls(tmp_path):
    records = Records(tmp_path)
    for _ in range(2):
        records.begin({})
        records.add(Record("kernels", "norm", PASSED))
        time.sleep(0.05)
        records.add(Record("kernels", "gelu", PASSED))
    took = [r.at for r in records.records]
    records.begin({})
    assert abs(program.spent(records, "kernels") - (took[1] - took[0] + took[3] - took[2])) < 1e-9
    assert program.finished(records, "kernels") and not program.finished(records, "step")


def test_what_another_folder_holds_is_gone_on_with_and_left_as_it_is(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    records = Records(old)
    records.begin({})
    records.add(Record("kernels", "norm", PASSED))
    before = records.path.read_bytes()
    new.mkdir()
    again = program.resumed(new, old)
    again.begin({})
    assert again.done("kernels") == {"norm"} and again.call == 2 and records.path.read_bytes() == before
    assert program.resumed(new, old).done("kernels") == {"norm"}  # the same command, once more


def test_records_of_another_beginning_are_not_taken_for_those_that_are_gone_on_with(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        records = Records(folder)
        records.begin({"of": folder.name})
    before = records.path.read_bytes()
    with pytest.raises(SystemExit, match="has records of its own: leave --resume out"):
        program.resumed(new, old)
    assert records.path.read_bytes() == before


@pytest.mark.parametrize("command", ["record", "merge", "tests --device cpu --resume"])
def test_a_folder_without_records_is_refused_and_none_is_made(tmp_path, monkeypatch, command):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "missing", tmp_path / "empty"):
        here = ["--out", str(folder)] if "resume" not in command else [str(folder), "--out", str(tmp_path / "new")]
        monkeypatch.setattr("sys.argv", ["gpu", *command.split(), *here])
        with pytest.raises(SystemExit, match=r"fds: .* holds no records\.jsonl"):
            program.main()
    assert [path.name for path in tmp_path.iterdir()] == ["empty"] and not any((tmp_path / "empty").iterdir())


def test_cases_that_are_left_are_no_failure_and_cases_that_failed_are(tmp_path, capsys):
    records = Records(tmp_path)
    records.begin({})
    records.add(Record("kernels", "norm", PASSED))
    records.add(Record("kernels", "gelu", NO_TIME, error="cut off: no time left"))
    records.add(Record("kernels", "rotary", NO_TIME))
    assert program.outcome(records, ["kernels"]) == 0
    assert "2 cases left (2 of kernels): call again" in capsys.readouterr().out
    records.add(Record("kernels", "gelu", ERROR))
    assert program.outcome(records, ["kernels"]) == 1
    assert "1 cases failed" in capsys.readouterr().out
    records.add(Record("kernels", "gelu", PASSED))
    records.add(Record("kernels", "rotary", PASSED))
    assert program.outcome(records, ["kernels"]) == 0 and capsys.readouterr().out == ""


def test_on_the_cpu_parts_share_the_time_that_is_left_and_on_a_gpu_each_has_its_own(tmp_path):
    records, parts = Records(tmp_path), list(PARTS.values())
    records.begin({})
    assert program.share("cpu", parts, records, 200.0 * len(parts)) == 200.0
    assert program.share("cpu", parts[1:], records, 60.0 * (len(parts) - 1)) == 60.0
    shares = [program.share("cuda", parts[i:], records, 400.0) for i in range(len(parts))]
    assert shares == [min(400.0, part.seconds) for part in parts] and sum(part.seconds for part in parts) == 1800.0


def test_a_call_that_is_killed_loses_no_more_than_what_ran_and_the_next_one_goes_on_from_a_copy(tmp_path):
    """A rehearsal of a lent machine: the folder of results is emptied between calls, and a copy carried along."""
    command = [sys.executable, "-m", "benchmarks.gpu", testing.OTHERS, "--device", "cpu", "--jobs", "1"]
    command += ["--tests", "tests/benchmarks/gpu_laws.py"]
    environ = lambda sleeps: {**os.environ, "FDS_GPU_TEST_SLEEPS": sleeps}
    call = lambda sleeps, *more: subprocess.Popen([*command, *more], cwd=running.ROOT, env=environ(sleeps))
    lent, kept = tmp_path / "lent", tmp_path / "kept"
    process = call("600", "--out", str(lent))
    while len(Records(lent).latest(testing.OTHERS)) < 3:  # the listing and two tests
        assert process.poll() is None
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    while any(Path(f"/proc/{child}").exists() for child in children):
        time.sleep(0.1)  # they end with it, and leave the GPU to the next call
    assert not program.finished(Records(lent), testing.OTHERS)
    lent.rename(kept)
    assert call("0", "--out", str(lent), "--resume", str(kept)).wait() == 1
    records = Records(lent)
    ran = [(r.call, r.case.partition("::")[2], r.status) for r in records.records if "::" in r.case]
    assert ran == [
        (1, "test_that_passes", PASSED),
        (1, "test_a_law_that_fails", FAILED),
        (2, "test_that_sleeps", PASSED),  # first what never ran, and what passed not at all
        (2, "test_a_law_that_fails", FAILED),
    ]
    assert "| AssertionError: the words of the law |" in (lent / merging.PAGE).read_text()
    assert program.finished(records, testing.OTHERS)


def test_a_part_that_must_pass_ends_the_call(tmp_path, monkeypatch, capsys):
    must = attrs.evolve(PART, must_pass=True)
    monkeypatch.setattr(program, "PARTS", {must.name: must, "step": PARTS["step"]})
    monkeypatch.setattr(running, "run", lambda call, part, records, until: records.add(Record(part.name, "a", FAILED)))
    options = argparse.Namespace(parts=[], out=tmp_path, device="cpu", tests="", jobs=1, seconds=400.0)
    assert program.run(options, records := Records(tmp_path)) == 1
    assert [(r.part, r.status) for r in records.records] == [(must.name, FAILED), ("step", NO_TIME)]
    assert "has to pass before anything else" in capsys.readouterr().out


def test_what_a_python_lacks_is_said_before_it_is_imported():
    lacking = subprocess.run(
        [sys.executable, "-S", "-m", "benchmarks.gpu", "--device", "cpu"],  # -S: without site-packages
        cwd=running.ROOT,
        env={**os.environ, "PYTHONPATH": str(running.ROOT)},
        capture_output=True,
        text=True,
    )
    assert lacking.returncode == 1 and "Traceback" not in lacking.stderr
    assert lacking.stderr.startswith("fds: torch, ") and f"cannot be imported by {sys.executable}" in lacking.stderr
    assert "GPU_PYTHON=.venv/bin/python" in lacking.stderr and "GPU_SITE=" in lacking.stderr
    assert what_is_missing({"a package": "no_such_module", "json": "json"}).startswith("fds: a package cannot")
    assert what_is_missing({"json": "json"}) == ""
