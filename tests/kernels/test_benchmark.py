"""The benchmark's contenders do the same work: all run once, at tiny sizes, and nothing is timed."""

import subprocess
import sys
import time
import types

import attrs
import pytest
import torch
from rich.console import Console

from benchmarks import kernel_timing, kernels, report
from benchmarks.kernel_timing import COPIED_BYTES, Timed
from benchmarks.kernel_works import Goals, Setting, Way, Work, differences, disagreement
from fds.kernels import only as kernels_only

CPU = torch.device("cpu")
TINY = Setting(CPU, tiny=True, compiled=lambda f: f)


@pytest.mark.parametrize("family", kernels.FAMILIES)
def test_every_contender_of_a_family_agrees(family):
    works = {(work.family, work.size): work for work in kernels.FAMILIES[family](TINY)}  # all phases are checked as one
    assert works
    with kernels_only("triton"):
        for work in works.values():
            for way in work.ways:
                assert disagreement(work, way, CPU, seed=7) == "", f"{work.name}, {work.size}: {way.name}"


@pytest.mark.parametrize("wrong", [lambda y: 1.1 * y, lambda y: y[:-1], lambda y: y.clone().fill_(float("nan"))])
def test_a_contender_that_does_other_work_is_seen(wrong):
    work = next(kernels.FAMILIES["norms"](TINY))
    call = work.ways[1].call
    assert disagreement(work, Way("wrong", lambda **given: wrong(call(**given))), CPU, seed=7)


def test_numbers_that_are_not_there_never_agree():
    nan = torch.full((3,), float("nan"))
    assert differences((nan,), (nan,), 1.0) and differences((torch.ones(3),), (nan,), 1.0)
    assert not differences((torch.ones(3),), (torch.ones(3),), 0.0)


@pytest.mark.parametrize("phase", ["forward", "backward", "both"])
def test_what_is_timed_can_be_called_again(phase):
    work = attrs.evolve(next(kernels.FAMILIES["norms"](TINY)), phase=phase)
    for way in work.ways:
        call = work.prepare(way, work.inputs(torch.Generator().manual_seed(0)))
        first, second = call(), call()
        assert len(first) == {"forward": 1, "backward": 3, "both": 4}[phase]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_torchs_compiler_takes_what_is_compiled():
    compiled = Setting(CPU, tiny=True, compiled=lambda f: torch.compile(f, backend="aot_eager", dynamic=False))
    work = next(kernels.FAMILIES["softmax"](compiled))
    (way,) = (way for way in work.ways if way.name == "torch.compile")
    assert disagreement(work, way, CPU, seed=7) == ""


def test_goals_are_met_where_the_interval_reaches_them():
    work = Work(
        "norm",
        "tiny",
        "forward",
        lambda g: {},
        [Way("fds", None), Way("torch eager", None)],
        Way("", None),
        COPIED_BYTES // 2,
        Goals(0.9, {"torch eager": 0.5}, {"torch eager": 0.25}),
    )
    seconds = {"fds": (1.0,) * 20, "torch eager": (1.5,) * 20, "copy": (1.9,) * 20}
    timed = Timed(work, seconds, {"fds": 1, "torch eager": 4}, {}, {"fds": 1.0, "torch eager": 2.0})
    assert [(got, met) for _, got, met in kernels.goals(timed)] == [("0.950", True), ("0.667", False), ("0.250", True)]
    tables = kernels.tables_of([timed], ["not begun"])
    assert [title.split(",")[0].split(" ")[0] for title, *_ in tables] == ["Time", "Not", "Goals"]
    assert all(len(row) == len(header) for _, header, rows in tables for row in rows)
    assert "NO" in kernels.line(timed)


def test_a_kernel_that_disagrees_meets_no_goal():
    work = attrs.evolve(next(kernels.FAMILIES["norms"](TINY)), goals=Goals(0.9))
    timed = Timed(work, {"torch eager": (1.0,), "copy": (1.0,)}, {"torch eager": 1}, {"fds": "result 0 is apart"}, {})
    assert [met for *_, met in kernels.goals(timed)] == [False]
    assert [row[-1] for row in kernels.tables_of([timed], [])[-1][2]] == ["NO"]


def test_only_what_is_asked_for_is_made():
    names = lambda *only: {work.family for work in kernels.works(TINY, list(only))}
    assert names("updates") == {"adamw", "lion", "sgd, momentum"}
    assert names("rms_norm", "swiglu") == {"rms_norm", "swiglu"}


class Event:
    """Time as the processor has it, in milliseconds."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Let the CPU stand for a GPU, with a cache of 1 KB."""
    nothing, zero = (lambda *_: None), (lambda *_: 0)
    for name, value in {
        "is_available": lambda: True,
        "Event": Event,
        "synchronize": nothing,
        "_sleep": nothing,
        "empty_cache": nothing,
        "get_device_properties": lambda device: types.SimpleNamespace(L2_cache_size=1024),
        "get_device_name": lambda *_: "none",
        "reset_peak_memory_stats": nothing,
        "memory_allocated": zero,
        "max_memory_allocated": lambda *_: 1000,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(kernel_timing, "COPIED_BYTES", 4096)
    monkeypatch.setattr(kernels, "setting", lambda: TINY)


@pytest.mark.parametrize("only", ["swiglu", "adamw"])
def test_the_program_runs_from_checks_to_tables(only, pretended_gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--quick", "--only", only, "--out", str(tmp_path)])
    with kernels_only("triton"):
        assert kernels.main() in (0, 1)  # the goals are a GPU's
    shown = capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    kept = path.read_text()
    assert shown.partition("Goals")[2].count(only) > 0  # the goals come last
    assert "## Goals" in kept and "triton:" in kept and "TB/s" in kept and "Not timed" not in kept


def test_a_peer_that_fails_is_told_and_not_timed(pretended_gpu):
    work = next(kernels.FAMILIES["norms"](TINY))
    broken = [Way("peer", lambda **_: 1 / 0), Way("wrong", lambda x, weight, bias: x + weight + bias)]
    work = attrs.evolve(work, ways=[*work.ways, *broken])
    with kernels_only("triton"):
        timed = kernel_timing.Clock(CPU).time(work, rounds=2)
    assert timed.failed["peer"].startswith("ZeroDivisionError") and "apart" in timed.failed["wrong"]
    assert set(timed.seconds) == {"fds", "fds again", "torch eager", "torch.compile", "copy"}
    assert [row[0] for row in kernels.tables_of([timed], [])[1][2]] == ["peer", "wrong"]


def test_the_text_of_an_error_is_shown_as_it_is(capsys):
    table = ("Not timed", ["contender", "why"], [["peer", "OSError: no such file [/a/b]"]])
    report.show_tables(kernels.literal([table]), Console())
    assert "[/a/b]" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_said_and_nothing_is_kept(pretended_gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--only", "updates", "--seconds", "0", "--out", str(tmp_path)])
    with kernels_only("triton"):
        assert kernels.main() == 1
    assert "no time left" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_without_a_gpu_it_says_so_and_shows_what_was_compiled(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["kernels.py"])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run = lambda command, cwd, env: ran.append((command, env)) or subprocess.CompletedProcess(command, 0)
    monkeypatch.setattr(subprocess, "run", run)
    assert kernels.main() == 0
    assert capsys.readouterr().out.startswith("No GPU here")
    assert "swiglu" in {command[-1] for command, _ in ran}
    assert all(command[-2] == "tests.kernels.ahead_of_time" for command, _ in ran)
    assert not any("TRITON_INTERPRET" in environment for _, environment in ran)
