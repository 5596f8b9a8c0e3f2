"""The whole step's contenders do the same work, and what is measured of them comes to tables; nothing is timed here."""

import attrs
import pytest
import torch

import fds
from benchmarks.children import Outcome
from benchmarks.gpu import step, step_contenders, step_measure, step_model, step_tables
from benchmarks.gpu.records import ERROR, NO_TIME, PASSED, Failed, Record, Records
from benchmarks.kernel_works import Setting
from tests.benchmarks import pretended_gpu

CPU = torch.device("cpu")
TINY = Setting(CPU, tiny=True, compiled=lambda f: f)
QUICK = ["fds, torch's operators", "fds, autocast"]  # the others compile, or interpret kernels


def first_losses(call, count=step_measure.STEPS):
    return [float(call()) for _ in range(count)]


@pytest.fixture(scope="module")
def eager():
    return first_losses(step.named(step_contenders.EAGER).make(TINY, 2))


def test_both_models_are_the_same_function():
    plain, fused = (step_contenders.model(kind, TINY) for kind in (step_model.GPT, step_model.FusedGPT))
    ((tokens, targets), *_) = step_model.batches(step_model.TINY, 2, CPU)
    results = []
    for model in (plain, fused):
        loss = model(tokens, targets)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def test_the_operations_of_a_token_are_six_a_parameter_and_attention():
    with torch.device("meta"):
        model = step_model.GPT(step_model.GPT2)
    parameters = sum(p.numel() for p in model.parameters())
    assert 123e6 < parameters < 125e6
    of_positions = 1024 * 768
    assert step_model.GPT2.flops_per_token(model) == 6 * (parameters - of_positions) + 12 * 12 * 768 * 1024


@pytest.mark.parametrize("name", QUICK)
def test_contenders_train_alike_and_one_that_does_not_is_seen(name, eager, monkeypatch):
    losses = first_losses(step.named(name).make(TINY, 2))
    outcomes = {(2, step_contenders.EAGER): Outcome({"losses": eager}), (2, name): Outcome({"losses": losses})}
    monkeypatch.setattr(step, "_alone", outcomes)
    assert step.apart(2, name) == ""
    for wrong in ([losses[0]] * len(losses), [*losses[:-1], float("nan")]):
        outcomes[2, name] = Outcome({"losses": wrong})
        assert "more than" in step.apart(2, name)


def test_the_fused_model_trains_alike_by_references(eager):
    parts = fds.precision(torch.bfloat16), fds.reference_kernels()
    losses = first_losses(step_contenders.step(TINY, 2, step_model.FusedGPT, *parts))
    assert losses == pytest.approx(eager, rel=step.LOSSES_WITHIN / 4)


def test_what_a_contender_takes_is_measured_alone_and_beside_another(monkeypatch):
    made = []
    one = step.named(QUICK[0])
    make = lambda setting, rows: made.append(one.make(setting, rows)) or made[-1]
    alone = step_measure.alone(lambda: make(TINY, 2), CPU)
    assert len(alone["losses"]) == step_measure.STEPS and alone["peak_bytes"] > alone["held_bytes"] > 0
    assert alone["operators"] > 100 and alone["kernels"] == alone["launches"] == 0
    monkeypatch.setattr(step, "_beside", {2: (step_contenders.COMPILED, made[0])})
    figures = step.beside(TINY, one, 2)
    assert len(figures["seconds"]) == len(figures["beside_seconds"]) == 2
    assert figures["host_us"] > 0 and figures["tokens"] == 2 * step_model.TINY.context


def test_on_a_gpu_the_allocator_tells_the_peak_and_some_steps_make_a_timing(monkeypatch):
    pretended_gpu.pretend(monkeypatch)
    gpu, call = torch.device("cuda"), lambda: torch.ones(())
    alone = step_measure.alone(lambda: call, gpu)
    assert (alone["peak_bytes"], alone["reserved_bytes"], alone["held_bytes"]) == (1000, 2000, 100)
    assert alone["launches"] == 0
    assert all(us > 0 for us in step_measure.host_us(call, gpu))
    made = []
    monkeypatch.setattr(step_measure, "seconds", lambda call, calls, device: made.append((call(), calls)) or 0.03)
    series = step_measure.pairs(lambda: "a", lambda: "b", gpu, least=3, most=9)
    assert made[4:] == [("a", 4), ("b", 4), ("b", 4), ("a", 4), ("a", 4), ("b", 4)]  # 0.1 s each, in turned order
    assert series.contender == series.beside == (0.03,) * 3  # the interval is narrow at once


def test_a_contender_that_is_not_there_fails_and_the_others_go_on(monkeypatch, tmp_path):
    run = lambda tasks: {t.name: Outcome({"losses": [1.0]}) for t in tasks} | {QUICK[0]: Outcome(error="no such name")}
    monkeypatch.setattr(step, "_alone", {})
    monkeypatch.setattr(step.Pool, "run", lambda self, tasks: run(tasks))
    with pytest.raises(Failed, match="no such name"):
        step.alone(TINY, step.named(QUICK[0]), 2)
    assert step.alone(TINY, step.named(QUICK[1]), 2)["contender"] == QUICK[1]


def test_who_passed_in_an_earlier_call_does_not_run_again_but_for_the_one_to_compare_with(monkeypatch):
    ran = []
    monkeypatch.setattr(step, "_alone", {})
    monkeypatch.setattr(
        step.Pool, "run", lambda self, tasks: ran.extend(tasks) or {t.name: Outcome({"losses": [1.0]}) for t in ran}
    )
    names = [one.name for one in step_contenders.contenders()]
    done = frozenset(step.name_of(name, 2, TINY, "alone") for name in names if name != QUICK[0])
    step.alone(attrs.evolve(TINY, done=done), step.named(QUICK[0]), 2)
    assert {task.name for task in ran} == {QUICK[0], step_contenders.EAGER}


def test_every_case_has_a_name_of_its_own():
    for setting, rows in ((TINY, "2 x 16"), (Setting(CPU), "8 x 1024")):
        names = [case.name for case in step.cases(setting)]
        assert len(set(names)) == len(names) == 2 + 2 * (len(step_contenders.contenders()) + step.MAIN)
        assert f"fds, captured, {rows}, timed" in names


def timed(name, ms, rows=8):
    many = {"beside_seconds": [0.02] * 20, "seconds": [ms / 1e3] * 20, "beside": step_contenders.COMPILED}
    more = {"host_us": 5.0, "cpu_us": 4.0, "tokens": rows * 1024, "flops_per_token": 10**9}
    return Record(
        "step", f"{name}, {rows}", PASSED, figures={"contender": name, "rows": rows, "what": "", **many, **more}
    )


def test_tables_come_from_records_and_goals_are_of_the_fastest(tmp_path):
    records = Records(tmp_path)
    records.add(Record("step", step.PRODUCT, PASSED, figures={"flops": 800e12}))
    sizes = {"peak_bytes": 2**21, "reserved_bytes": 2**22, "held_bytes": 2**20, "first steps, s": 1.0}
    counts = {"kernels": 3, "launches": 2, "operators": 5}
    for name, last in ((step_contenders.EAGER, 9.0), ("fds, captured", 9.9)):
        alone = {"contender": name, "rows": 8, "what": "it trains", "losses": [10.0, last], **sizes, **counts}
        records.add(Record("step", f"{name}, alone", PASSED, figures=alone))
    for record in (timed("fds, captured", 18.5), timed("fds, kernels", 17.0), timed(step_contenders.COMPILED, 20.0)):
        records.add(record)
    records.add(Record("step", "fds, compiled, timed", ERROR, error="Traceback\nAttributeError: no compile"))
    records.add(Record("step", "never begun", NO_TIME))
    pair = {"contender": "a", "beside": "a", "agree": "bit for bit", "memory": 1.0}
    pair |= {"seconds": [0.002] * 20, "beside_seconds": [0.001] * 20}
    records.add(Record("step", step.EXAMPLE, PASSED, figures={"pairs": [pair]}))
    tables = {
        title.split(" (")[0]: rows for title, _, rows in step.tables(list(Records(tmp_path).latest("step").values()))
    }
    assert tables["A step"][0][2:6] == ["18.5", "442,811", "0.448", "0.554"]
    assert [row[6] for row in tables["A step"]][-1] == "torch.compile (A/A)"
    assert tables["Alone in a process"][1][-3:] == ["9.9000", "1.0e-01", "1.0"]
    assert tables["Not run, or not as the others"] == [
        ["fds, compiled, timed", "AttributeError: no compile"],
        ["never begun", "no time left"],
    ]
    assert [row[1:5] for row in tables["The example's GPT in float32, a small one"]] == [
        ["a (A/A)", "2", "1", "2.0000"]
    ]
    assert [(row[0], row[-2:]) for row in tables["Goals"]] == [
        ("fds, kernels, 8 x 1024", ["0.850", "yes"]),
        ("fds, captured, 8 x 1024", ["0.925", "NO"]),
    ]
    assert step_tables.tables([])[-1][2] == []
