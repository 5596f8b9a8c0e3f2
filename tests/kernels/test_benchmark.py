"""The benchmark's contenders do the same work: all run once, at tiny sizes, and nothing is timed."""

import collections
import subprocess
import sys

import attrs
import pytest
import torch
from rich.console import Console

from benchmarks import kernel_peers, kernel_sparse, kernel_tables, kernel_timing, kernel_units, kernels, report
from benchmarks.children import Outcome
from benchmarks.gpu.records import FAILED, NO_TIME, PASSED, Record, Records
from benchmarks.kernel_timing import COPIED_BYTES, Clock, Timed
from benchmarks.kernel_works import Goals, Setting, Way, by_tracing, differences, disagreement
from fds.attention_layouts import bslongformer
from fds.kernels import only as kernels_only
from tests.benchmarks import pretended_gpu

CPU = torch.device("cpu")
TINY = Setting(CPU, tiny=True, compiled=lambda f: f)
FULL = Setting(torch.device("meta"))


@pytest.mark.parametrize("family", kernel_units.FAMILIES)
def test_every_contender_of_a_family_agrees(family):
    works = {
        (work.family, work.size): work for work in kernel_units.FAMILIES[family](TINY)
    }  # all phases are checked as one
    assert works
    with kernels_only("triton"):
        for work in works.values():
            for way in work.ways:
                assert disagreement(work, way, CPU, seed=7) == "", f"{work.name}, {work.size}: {way.name}"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_what_a_layout_lists():  # it has no backward on a CPU, so it is a contender on a GPU alone
    layout = bslongformer(1, 3, block=16, num_sliding_window_blocks=1)
    q, k, v = torch.randn(3, 1, 2, 48, 16).unbind(0)
    out = kernel_sparse.by_flex(TINY, layout)(q, k, v)
    torch.testing.assert_close(out, kernel_sparse._masked(layout)(q, k, v))


@pytest.mark.parametrize("wrong", [lambda y: 1.1 * y, lambda y: y[:-1], lambda y: y.clone().fill_(float("nan"))])
def test_a_contender_that_does_other_work_is_seen(wrong):
    work = next(kernel_units.FAMILIES["norms"](TINY))
    call = work.ways[1].call
    assert disagreement(work, Way("wrong", lambda **given: wrong(call(**given))), CPU, seed=7)


def test_numbers_that_are_not_there_never_agree():
    nan = torch.full((3,), float("nan"))
    assert differences((nan,), (nan,), 1.0) and differences((torch.ones(3),), (nan,), 1.0)
    assert not differences((torch.ones(3),), (torch.ones(3),), 0.0)


@pytest.mark.parametrize("phase", ["forward", "backward", "both"])
def test_what_is_timed_can_be_called_again(phase):
    work = attrs.evolve(next(kernel_units.FAMILIES["norms"](TINY)), phase=phase)
    for way in work.ways:
        call = work.prepare(way, work.inputs(torch.Generator().manual_seed(0)))
        first, second = call(), call()
        assert len(first) == {"forward": 1, "backward": 3, "both": 4}[phase]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_torchs_compiler_takes_what_is_compiled():
    compiled = Setting(CPU, tiny=True, compiled=by_tracing)
    work = next(kernel_units.FAMILIES["softmax"](compiled))
    (way,) = (way for way in work.ways if way.name == "torch.compile")
    assert disagreement(work, way, CPU, seed=7) == ""


GOALS = Goals(0.9, {"torch eager": 0.5}, {"torch eager": 0.25})
SECONDS = {"fds": (1.0,) * 20, "torch eager": (1.5,) * 20, "copy": (1.9,) * 20}
NORM = Timed(
    "norm, forward",
    "tiny",
    "fds",
    SECONDS,
    {"fds": 1, "torch eager": 4},
    {"peer": "not installed"},
    {"fds": 1.0, "torch eager": 2.0},
    COPIED_BYTES // 2,
    0,
    GOALS,
)


def test_goals_are_met_where_the_interval_reaches_them():
    found = kernel_tables.goals(NORM)
    assert [(got, met) for _, got, met in found] == [("0.950", True), ("0.667", False), ("0.250", True)]
    tables = kernel_tables.tables_of([NORM], {"another": "no time left"})
    assert [title.split(",")[0].split(" ")[0] for title, *_ in tables] == ["Time", "Not", "Goals"]
    assert all(len(row) == len(header) for _, header, rows in tables for row in rows)
    assert "NO" in kernel_tables.line(NORM)


def test_a_kernel_that_disagrees_meets_no_goal():
    timed = attrs.evolve(NORM, failed={"fds": "result 0 is apart"})
    assert [met for *_, met in kernel_tables.goals(timed)] == [False]
    assert [row[-1] for row in kernel_tables.tables_of([timed], {})[-1][2]] == ["NO"]


def test_what_was_timed_comes_back_from_its_record(tmp_path):
    records = Records(tmp_path)
    records.add(Record("kernels", "norm", PASSED, figures=NORM.figures()))
    (read,), missing = kernels.timed_of(Records(tmp_path).latest("kernels").values())
    assert kernel_tables.tables_of([read], missing) == kernel_tables.tables_of([NORM], {})


def test_only_what_is_asked_for_is_made():
    names = lambda *only: {work.family for work in kernel_units.works(TINY, list(only))}
    assert names("updates") == {"adamw", "lion", "sgd, momentum"}
    assert names("rms_norm", "swiglu") == {"rms_norm", "swiglu"}


def test_every_case_has_a_name_of_its_own_and_none_is_left_out():
    named = [case.name for case in kernels.cases(FULL)]
    assert len(set(named)) == len(named)
    assert {kernels.name_of(work) for work in kernel_units.works(FULL, [])} < set(named)


def test_the_first_size_of_everything_comes_before_the_second_of_anything():
    listed = kernel_units.in_turn(kernel_units.works(FULL, []))
    units = list(dict.fromkeys((work.family, work.unit) for work in listed))
    turns, seen = [], collections.Counter()
    for family, _ in units:
        turns.append(seen[family])
        seen[family] += 1
    assert turns == sorted(turns) and turns[-1] > 2
    assert units[0][0] == "flash_attention, causal" and turns.count(0) > 15


@pytest.fixture
def checked_here(monkeypatch):
    """Check in this process instead of children, and forget it after the test."""
    here = lambda setting, names, **_: {name: Outcome(check(name)) for name in names}
    check = lambda unit: kernel_units.check("cpu", True, unit, skip={}, tell=lambda way: None)
    monkeypatch.setattr(kernel_units, "checked", here)
    monkeypatch.setattr(kernel_units, "setting_of", lambda device, tiny: TINY)
    monkeypatch.setattr(kernels, "_checked", {})


def program(monkeypatch, folder, *arguments):
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--device", "cpu", "--out", str(folder), *arguments])
    return kernels.main()


def test_the_program_runs_from_checks_to_tables_and_does_nothing_twice(checked_here, monkeypatch, capsys, tmp_path):
    assert program(monkeypatch, tmp_path, "--rounds", "2", "--only", "lion,sgd") in (0, 1)  # the goals are a GPU's
    shown = capsys.readouterr().out
    (path,) = tmp_path.glob("*.md")
    kept = path.read_text()
    assert shown.partition("Goals")[2].count("lion") == 1  # the goals come last
    assert "## Goals" in kept and "triton:" in kept and "TB/s" in kept and "Not timed" not in kept
    before = Records(tmp_path).records
    assert next(r.case for r in before if r.status == PASSED).startswith(kernels.AHEAD)
    assert [r.case.split(",")[0] for r in before if "seconds" in r.figures] == ["lion", "sgd"]
    program(monkeypatch, tmp_path, "--rounds", "2", "--only", "lion,sgd")
    assert [r.case for r in Records(tmp_path).records if "seconds" in r.figures] == [
        r.case for r in before if "seconds" in r.figures
    ]


def test_a_peer_that_fails_is_told_and_not_timed(checked_here):
    work = next(kernel_units.FAMILIES["norms"](TINY))
    broken = [Way("peer", lambda **_: 1 / 0), Way("wrong", lambda x, weight, bias: x + weight + bias)]
    work, clock = attrs.evolve(work, ways=[*work.ways, *broken]), Clock(CPU, 4096)
    with kernels_only("triton"):
        failed = clock.check(work, skip={"torch eager": "took more than 1 s"}, tell=lambda name: None)
        timed = clock.time(work, rounds=2, failed=failed)
    assert timed.failed["peer"].startswith("ZeroDivisionError") and "apart" in timed.failed["wrong"]
    assert timed.failed["torch eager"] == "took more than 1 s"
    assert set(timed.seconds) == {"fds", "fds again", "torch.compile", "copy"}
    assert [row[0] for row in kernel_tables.tables_of([timed], {})[1][2]] == ["torch eager", "peer", "wrong"]


def test_a_gpu_is_timed_by_events_behind_a_wait_and_weighed_by_its_allocator(monkeypatch):
    called = pretended_gpu.pretend(monkeypatch)
    clock = Clock(CPU, 4096)
    clock.on_gpu = True
    work = next(kernel_units.FAMILIES["elementwise"](TINY))
    with kernels_only("triton"), kernel_units.compiler():
        failed = clock.check(work, skip={}, tell=lambda name: None)
        timed = clock.time(work, rounds=2, failed=failed)
    assert not timed.failed and set(timed.peak_bytes.values()) == {900}
    assert len(timed.seconds["fds"]) == 2 and all(s > 0 for s in timed.seconds["fds"])
    assert called.count("empty_cache") == len(work.ways) and called.count("_sleep") > 2 * len(timed.seconds)
    assert called.count("Event") % 2 == 0


def test_a_gpu_that_no_longer_answers_ends_the_process(monkeypatch):
    ended, clock = [], Clock(CPU, 4096)
    pretended_gpu.pretend(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: (_ for _ in ()).throw(RuntimeError("illegal access")))
    monkeypatch.setattr(kernel_timing.os, "_exit", ended.append)
    clock.on_gpu = True
    clock.release()
    assert ended == [70]


def test_a_peer_that_is_not_there_says_so(monkeypatch):
    monkeypatch.setattr(kernel_peers, "KNOWN", {"norm": (("nobody", "no_such_package", "norm", lambda f: f),)})
    (way,) = kernel_peers.peers(attrs.evolve(TINY, device=torch.device("cuda")), "norm")
    with pytest.raises(ImportError, match=r"^not installed$"):
        way.call(torch.ones(3))


def test_a_kernel_that_is_wrong_is_recorded_and_its_neighbours_are_timed(checked_here, monkeypatch, tmp_path):
    check = kernel_units.checked
    wrong = lambda setting, names, **_: {
        name: Outcome(outcome.result | {"fds": "result 0 is apart"} if "lion" in name else outcome.result)
        for name, outcome in check(setting, names).items()
    }
    monkeypatch.setattr(kernel_units, "checked", wrong)
    assert program(monkeypatch, tmp_path, "--rounds", "2", "--only", "lion,sgd") == 1
    statuses = [r.status for r in Records(tmp_path).latest("kernels").values()]
    assert statuses == [PASSED, FAILED, PASSED]
    monkeypatch.setattr(kernel_units, "checked", lambda setting, names, **_: {n: Outcome(error="gone") for n in names})
    monkeypatch.setattr(kernels, "_checked", {})
    program(monkeypatch, tmp_path / "gone", "--rounds", "2", "--only", "lion,sgd")
    assert {r.status for r in Records(tmp_path / "gone").records if r.case.startswith("lion")} == {FAILED}


def test_the_text_of_an_error_is_shown_as_it_is(capsys):
    table = ("Not timed", ["contender", "why"], [["peer", "OSError: no such file [/a/b]"]])
    report.show_tables(kernels.literal([table]), Console())
    assert "[/a/b]" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_said(checked_here, monkeypatch, capsys, tmp_path):
    assert program(monkeypatch, tmp_path, "--only", "updates", "--seconds", "0") == 1
    assert "no time left" in capsys.readouterr().out and not list(tmp_path.glob("*.md"))
    assert {r.status for r in Records(tmp_path).records} == {NO_TIME}


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
