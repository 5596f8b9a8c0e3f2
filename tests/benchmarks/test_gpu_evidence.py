"""The record of kernels that passed, of the results of a run: all cases of a kernel, with the code that is here."""

import copy
import json
import re
from pathlib import Path

import pytest

from benchmarks.gpu import evidence, merging, program
from benchmarks.gpu.records import ERROR, FAILED, NO_TIME, PASSED, Record, Records
from fds.kernels.evidence import HOMES, Passed, fingerprint, read, write
from tests.kernels.test_evidence import passed

ROOT = Path(__file__).parents[2]
SWIGLU = "tests/kernels/test_swiglu.py::test_it[{}]"


def call(**changes) -> dict:
    facts = {
        "device": "cuda",
        "GPU": "NVIDIA H200, sm_90, 143771 MiB, CUDA 13.0",
        "torch": "2.11.0+cu130",
        "triton": "3.6.0",
        "at": 1764633600.0,
        "kernels": evidence.fingerprints(),
    }
    return {**facts, **changes}


def timed(size: str, status: str = PASSED, **seconds) -> dict:
    figures = {"seconds": {name.replace("_", " "): [some, some, 9.0] for name, some in seconds.items()}}
    return {"case": f"swiglu, forward, {size}", "status": status, "call": 1, "figures": figures}


def results() -> dict:
    tests = [{"case": SWIGLU.format(i), "status": PASSED, "call": 1} for i in range(3)]
    kernels = [
        timed("4096 x 8, bfloat16", fds=1.0, torch_eager=1.5, torch_compile=0.1, liger=0.2),
        timed("8192 x 8, bfloat16", fds=1.0, torch_eager=1.5, torch_fused=1.0),
        timed("8 x 8, float32", fds=2.0, torch_eager=1.5),
        timed("9 x 9, float16", NO_TIME),
        {"case": "TransformerLayer, both, large", "status": FAILED, "call": 1, "figures": {}},
    ]
    return {"calls": [call()], "parts": {"tests": tests, "kernels": kernels}}


@pytest.fixture
def made(tmp_path):
    """Return a function that records results, beside two entries that are there: what was told, and the entries."""

    def record(found: dict) -> tuple[dict[str, str], dict[tuple[str, str], Passed]]:
        (tmp_path / "results.json").write_text(json.dumps(found))
        before = [passed("swiglu", num_cases=1), passed("swiglu", architecture="sm_80")]
        write(tmp_path / "passed.json", before)
        told = evidence.record(tmp_path / "results.json", tmp_path / "passed.json")
        return told, {(entry.kernel, entry.architecture): entry for entry in read(tmp_path / "passed.json")}

    return record


def test_a_kernel_that_passed_is_recorded_with_where_and_how_fast(made):
    told, entries = made(results())
    assert entries.keys() == {("swiglu", "sm_90"), ("swiglu", "sm_80")}
    assert entries["swiglu", "sm_90"] == Passed(
        kernel="swiglu",
        architecture="sm_90",
        gpu="NVIDIA H200",
        date="2025-12-02",
        torch="2.11.0+cu130",
        triton="3.6.0",
        dtypes=("bfloat16", "float16", "float32"),
        num_cases=3,
        source=fingerprint("swiglu"),
        speed={"bfloat16": 1.22, "float32": 0.75},  # sqrt(1.5 * 1.0), rounded down
    )
    assert told["swiglu"].startswith("passed 3 cases on NVIDIA H200") and told.keys() == HOMES.keys()
    assert told["rotary"] == "not recorded: no test of tests/kernels/test_rotary.py ran"


def change(kind: str, found: dict) -> None:
    tests, kernels = found["parts"]["tests"], found["parts"]["kernels"]
    if kind in (FAILED, ERROR, NO_TIME):
        tests[1]["status"] = kind
    elif kind == "timed":
        kernels[0]["status"] = FAILED
    elif kind == "other code":
        found["calls"][0]["kernels"]["swiglu"] = "0" * 16
    elif kind == "unknown code":
        del found["calls"][0]["kernels"]
    elif kind == "two codes":
        found["calls"].append(call(kernels={"swiglu": "0" * 16}))
        tests[2]["call"] = 2
    elif kind == "two GPUs":
        found["calls"].append(call(GPU="NVIDIA L4, sm_89, 1 MiB, CUDA 13.0"))
        tests[2]["call"] = 2
    elif kind == "a CPU":
        found["calls"][0] |= {"device": "cpu", "GPU": "none"}
    else:
        tests.clear()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (FAILED, r"1 of 3 tests did not pass: .*test_it\[1\]: failed"),
        (ERROR, r"1 of 3 tests did not pass: .*test_it\[1\]: error"),
        (NO_TIME, r"1 of 3 tests did not pass: .*: skipped-no-time"),
        ("timed", "swiglu, forward, 4096 x 8, bfloat16: failed"),
        ("other code", "the kernel changed since"),
        ("unknown code", "the kernel changed since"),
        ("two codes", "the kernel changed since"),
        ("two GPUs", "cases ran on NVIDIA H200, NVIDIA L4"),
        ("a CPU", "did not run on a GPU"),
        ("no tests", "no test of tests/kernels/test_swiglu.py ran"),
    ],
)
def test_a_kernel_that_did_not_pass_all_of_its_cases_here_is_not_recorded(made, kind, why):
    found = copy.deepcopy(results())
    change(kind, found)
    told, entries = made(found)
    assert re.search(why, told["swiglu"]) and told["swiglu"].startswith("not recorded: ")
    assert entries.keys() - {("swiglu", "sm_90")} == {("swiglu", "sm_80")}
    assert (("swiglu", "sm_90") in entries) == (kind == "a CPU")  # which says nothing about GPUs


def test_what_torch_does_and_what_other_kernels_do_blocks_no_kernel():
    case = "tests/kernels/test_flat.py::test_a_skipped_update_keeps_every_bit[nan-{}]"
    asked = lambda kernel, words: evidence.tests(kernel, case.format(words))
    assert asked("sgd", "triton-sgd_momentum") and asked("adamw", "triton-adamw") and asked("adamw", "1e-3")
    assert not asked("adamw", "reference-adamw") and not asked("adamw", "triton-lion")
    assert evidence.tests("adamw", "tests/kernels/test_multi_tensor.py::test_momentum")


def test_attention_that_torch_computes_anyway_is_not_compared():
    speed = lambda case: evidence.speed_of(
        [{"case": case, "figures": {"seconds": {"fds": [2.0], "torch SDPA": [1.0]}}}]
    )
    assert speed("flash_attention, causal, forward, 8 x 8, bfloat16") == {}
    assert speed("flash_attention, mask and dropout, both, 8 x 8, bfloat16") == {"bfloat16": 0.5}


def test_an_update_is_compared_in_the_dtype_of_its_parameters():
    figures = {"seconds": {"fds": [1.0], "torch fused": [1.0]}}
    case = {"case": "adamw, update, 9 in float32, bfloat16 gradients", "figures": figures}
    assert evidence.speed_of([case]) == {"float32": 1.0}


def test_the_files_that_a_kernel_has_to_pass_are_there_and_test_it_in_every_dtype():
    assert evidence.TESTS.keys() == HOMES.keys()
    for kernel, names in evidence.TESTS.items():
        texts = [(ROOT / f"tests/kernels/test_{name}.py").read_text() for name in names.split()]
        assert any(re.search(rf"\b{kernel}\b", text) for text in texts), kernel
        assert any("DTYPES" in text for text in texts), kernel


def test_a_run_records_the_kernels_that_it_ran(tmp_path, monkeypatch, capsys):
    """A call's facts, its records and the files made of them are what the record is made of."""
    monkeypatch.setattr(program, "gpu", lambda: "NVIDIA H200, sm_90, 143771 MiB, CUDA 13.0")
    records = Records(tmp_path)
    records.begin(program.facts("cuda"))
    records.add(Record("tests", SWIGLU.format(0), PASSED))
    monkeypatch.setattr(program, "RECORD", tmp_path / "passed.json")
    write(tmp_path / "passed.json", [])
    monkeypatch.setattr("sys.argv", ["gpu", "record", "--out", str(tmp_path)])
    assert program.main() == 0
    (entry,) = read(tmp_path / "passed.json")
    assert (entry.kernel, entry.architecture, entry.speed) == ("swiglu", "sm_90", {})
    assert "passed 1 cases on NVIDIA H200 (not timed)" in capsys.readouterr().out
    assert fingerprint("swiglu") not in (tmp_path / merging.PAGE).read_text()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_folder_of_which_nothing_is_recorded_is_told_by_the_exit_status(tmp_path, monkeypatch, device):
    monkeypatch.setattr(program, "gpu", lambda: "NVIDIA H200, sm_90, 143771 MiB, CUDA 13.0")
    records = Records(tmp_path)
    records.begin(program.facts(device))
    records.add(Record("tests", SWIGLU.format(0), PASSED if device == "cpu" else FAILED))
    monkeypatch.setattr(program, "RECORD", tmp_path / "passed.json")
    write(tmp_path / "passed.json", before := [passed("swiglu", architecture="sm_80")])
    monkeypatch.setattr("sys.argv", ["gpu", "record", "--out", str(tmp_path)])
    if device == "cpu":
        with pytest.raises(SystemExit, match="ran on a GPU, so that nothing is recorded"):
            program.main()
    else:
        assert program.main() == 1
    assert read(tmp_path / "passed.json") == before
