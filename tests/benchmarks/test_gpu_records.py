"""Records of a run on a GPU: whatever was done is there after a kill, and a later call goes on behind it."""

import json

from benchmarks.gpu.records import BEGUN, ERROR, FAILED, NO_TIME, PASSED, Case, Record, Records, counted
from benchmarks.gpu.worker import left


def test_a_later_call_knows_what_passed_and_tries_the_rest_again(tmp_path):
    first = Records(tmp_path)
    first.begin({"device": "cpu"})
    first.add(Record("kernels", "norm", BEGUN))
    first.add(Record("kernels", "norm", PASSED, 1.5, {"ms": 0.25}))
    first.add(Record("kernels", "gelu", FAILED, error="0.1 apart"))
    first.add(Record("step", "norm", ERROR))
    assert first.done("kernels") == {"norm"} and first.tried("kernels") == {"norm", "gelu"}

    second = Records(tmp_path)
    second.begin({"device": "cpu"})
    second.add(Record("kernels", "gelu", NO_TIME))
    assert [head["head"] for head in second.heads] == [{"device": "cpu"}] * 2
    assert second.done("kernels") == {"norm"} and second.tried("kernels") == set()
    assert second.latest("kernels")["gelu"].error == "0.1 apart"  # what is known of it, not that no time was left
    assert second.latest("kernels")["norm"].figures == {"ms": 0.25}
    assert counted(second.latest("kernels").values()) == {PASSED: 1, FAILED: 1}
    assert first.refresh()[-1].call == 2


def test_a_line_that_a_kill_broke_off_is_left_out_and_ended(tmp_path):
    records = Records(tmp_path)
    records.begin({})
    records.add(Record("kernels", "norm", PASSED))
    with records.path.open("a") as file:
        file.write(json.dumps({"part": "kernels", "case": "gelu", "status": PASSED})[:-9])
    again = Records(tmp_path)
    assert again.done("kernels") == {"norm"}
    again.begin({})
    again.add(Record("kernels", "gelu", FAILED, error="x" * 100_000))
    assert Records(tmp_path).latest("kernels")["gelu"].status == FAILED and Records(tmp_path).call == 2
    assert records.path.stat().st_size < 6_000


def test_what_is_to_be_done_again_stays_before_what_it_is_for(tmp_path):
    records = Records(tmp_path)
    records.begin({})
    for case, status in (("ahead", PASSED), ("norm", PASSED), ("gelu", FAILED)):
        records.add(Record("kernels", case, status))
    records.begin({})
    cases = [Case("gelu", dict), Case("ahead", dict, again=True), Case("norm", dict), Case("new", dict)]
    assert [case.name for case in left(records, "kernels", cases)] == ["ahead", "new", "gelu"]
