"""A run on a GPU, unattended: no case takes the others with it, and what is done is on disk whatever happens."""

import json
import time
import xml.etree.ElementTree as ET

from benchmarks.gpu import __main__ as program, merging, running
from benchmarks.gpu.parts import Part
from benchmarks.gpu.records import ERROR, FAILED, NO_TIME, PASSED, Record, Records, counted

PART = Part("counters", "cases of all kinds", 60.0, "tests.benchmarks.gpu_cases")


def test_a_case_that_fails_hangs_or_crashes_leaves_the_others_alone_and_later_calls_go_on_behind_it(tmp_path):
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


def test_a_part_that_cannot_say_its_cases_is_an_error_and_not_tried_for_ever(tmp_path):
    records = Records(tmp_path)
    records.begin({})
    part = Part("counters", "a module that is not there", 60.0, "tests.benchmarks.no_such_module")
    running.run(running.Call(tmp_path, "cpu"), part, records, time.monotonic() + 300)
    (record,) = merging.cases_of(records, "counters")
    assert record.status == ERROR and "no_such_module" in record.error
    assert not program.finished(records, "counters", passed=True)


def test_files_tell_what_the_records_come_to(tmp_path):
    records = Records(tmp_path)
    records.begin({"device": "cpu"})
    records.add(Record("tests", "tests/a.py::test_b[c]", FAILED, 0.5, error="assert 1 == 2\nE  \x1b[31mno"))
    records.add(Record("tests", "tests/a.py::test_d", PASSED, 0.25))
    records.add(Record("tests", "tests/a.py::test_e", NO_TIME))
    records.add(Record("counters", "memcheck, swiglu", PASSED, 3.0, {"summary": "0 errors"}))
    merging.write(records)
    suite = ET.parse(tmp_path / merging.TESTS).getroot()
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["3", "1", "0", "1"]
    assert [case.get("name") for case in suite] == ["test_b[c]", "test_d", "test_e"]
    parts = json.loads((tmp_path / merging.RESULTS).read_text())["parts"]
    assert {part: counted(Record(**r) for r in some) for part, some in parts.items() if some} == {
        "tests": {PASSED: 1, FAILED: 1, NO_TIME: 1},
        "counters": {PASSED: 1},
    }
    page = (tmp_path / merging.PAGE).read_text()
    assert "| tests | 1 | 1 | 0 | 1 |" in page and "memcheck, swiglu" in page and "0 errors" in page
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
    assert program.finished(records, "kernels", passed=True) and not program.finished(records, "step")


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
