"""What the doctor says of kernels on a machine with a GPU, which is not here: what runs, why, and whether it does."""

import json

import pytest
import torch

from fds.command_line.doctor import Ended, Settings, machine
from fds.kernels import choice, evidence
from tests.kernels.test_evidence import passed


@pytest.fixture
def h200(monkeypatch):
    """Return a function: record, how the trial of a kernel ends -> the findings."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choice, "_architecture", lambda device: "sm_90")

    def findings(record, ended: Ended | None, tmp_path):
        monkeypatch.setattr(choice, "_decided", {})
        monkeypatch.setattr(evidence, "recorded", lambda: {(e.kernel, e.architecture): e for e in record})
        monkeypatch.setattr(machine, "run_together", lambda *args, **options: [ended])
        return list(machine.kernels(Settings(tmp_path, quick=ended is None)))

    return findings


def test_without_a_record_torchs_operators_run_and_how_kernels_would(h200, tmp_path):
    on_gpu, on_cpu = h200([], None, tmp_path)
    assert on_gpu.found == "torch's operators (no CUDA run of the kernel is recorded for sm_90)"
    assert on_gpu.what == "on cuda" and on_gpu.advice == "fds.triton_kernels() runs the kernels"
    assert on_cpu.found == "torch's operators (kernels run on GPUs)" and not on_cpu.advice
    assert on_gpu.values["kernels"] == list(evidence.HOMES)


def test_kernels_that_passed_are_named(h200, tmp_path):
    entries = [passed(name, dtypes=("float32", "float16", "bfloat16"), speed={}) for name in ("lion", "sgd")]
    texts = [one.found for one in h200(entries, None, tmp_path) if one.what == "on cuda"]
    assert "lion, sgd: Triton kernel (passed on NVIDIA H200 on 2026-12-01)" in texts and len(texts) == 2


@pytest.mark.parametrize(
    ("record", "level", "advice"),
    [
        ([], "note", "leave fds.triton_kernels() out"),
        ([passed("rms_norm")], "problem", "compose with fds.reference_kernels()"),
    ],
)
def test_a_kernel_that_fails_is_a_problem_where_it_is_chosen(h200, tmp_path, record, level, advice):
    for ended in (Ended(1, "", "it crashed"), Ended(0, json.dumps({"max_error": 1.0, "bound": 0.1}), "")):
        (on_gpu, on_cpu) = [one for one in h200(record, ended, tmp_path) if not one.what.startswith("on ")]
        assert on_gpu.level == level and advice in on_gpu.advice
        assert on_cpu.what == "interpreter" and on_cpu.level == "note"


def test_a_kernel_that_agrees_is_well(h200, tmp_path):
    found = h200([], Ended(0, json.dumps({"max_error": 1e-7, "bound": 0.1}), ""), tmp_path)
    assert {one.level for one in found} == {"ok"}
