"""`fds.timed` and `fds.trace`: parts that add up, no other bit, and what ranks did when in one file."""

import json
import time
from pathlib import Path
from unittest import mock

import attrs
import pytest
import torch
from torch import nn

import fds
from fds.errors import FdsError
from fds.step import ranges
from fds.step.ranges import Clock, clocked, profiled
from fds.timing import _timed
from tests.bits import bits
from tests.unit.step.problem import BATCH, make, make_params

PARTS = ("gather", "forward", "backward", "reduce", "optimizer", "offload", "wait", "other")


class Ticks:
    """A clock that goes on by what it is told."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def spend(self, ms):
        self.now += ms / 1e3


def test_each_part_is_without_the_parts_inside_it():
    ticks, clock = Ticks(), Clock(torch.device("cpu"))
    with mock.patch.object(time, "perf_counter", ticks), clocked(clock), clock.range("other"):
        ticks.spend(1)
        with profiled("forward", stage=1, microbatch=0):
            ticks.spend(2)
            with profiled("gather"):
                ticks.spend(4)
                with profiled("wait/all_gather"):
                    ticks.spend(8)
            ticks.spend(16)
        with profiled("backward_weight", stage=1, microbatch=0):
            ticks.spend(32)
        with profiled("backward"), profiled("reduce"):
            ticks.spend(64)
        with profiled("optimizer"):
            ticks.spend(128)
            with profiled("offload"):
                ticks.spend(512)
        ticks.spend(256)
    times = _timed.times_of(clock)
    want = {"gather": 4, "forward": 18, "backward": 32, "reduce": 64, "optimizer": 128, "wait": 8, "other": 257}
    want["offload"] = 512
    assert times.parts == pytest.approx(want) and (times.call_ms, times.busy_ms) == pytest.approx((1023, 1015))
    assert str(times).startswith("time (ms) | call: 1023.00 | gather: 4.00 | forward: 18.00 | ")
    assert ranges._now.clock is None and profiled("forward") is ranges._NOTHING


def test_what_a_monitor_is_given_are_deepspeeds_times_and_speeds():
    ticks, step = Ticks(), make()
    state = step.init(make_params())
    timed = fds.timed(samples=64, tokens=1024, flops=1e9, peak_flops=1e11)
    assert timed.metrics() == {} and timed.last is None
    with mock.patch.object(time, "perf_counter", ticks), timed(state):
        for part, ms in (("forward", 10), ("backward", 20), ("reduce", 5), ("wait/x", 3), ("optimizer", 2)):
            with profiled(part):
                ticks.spend(ms)
    found = timed.metrics()
    times = {name.removeprefix("elapsed_time_ms_"): ms for name, ms in found.items() if name.startswith("elapsed")}
    assert times == pytest.approx({
        "forward": 10, "backward": 28, "backward_inner": 20, "backward_allreduce": 8, "step": 2, "gather": 0,
        "offload": 0, "wait": 3, "other": 0, "call": 40,
    })  # fmt: skip
    speeds = {name: value for name, value in found.items() if not name.startswith("elapsed")}
    want = {"samples_per_s": 1600, "tokens_per_s": 25600, "flops_per_s": 25e9, "mfu": 0.25}
    assert speeds == pytest.approx(want) and timed.metrics() == found  # until the next ones are there


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_is_timed_is_bit_for_bit_the_one_that_is_not(stage, tmp_path):
    def run():
        axis = fds.mesh(dp=-1)["dp"]
        step = make(fds.accumulate(2), fds.shard_optimizer(axis, stage=stage))
        plain = watched = step.init(make_params())
        timed = fds.timed(every=2)
        for i in range(4):
            plain, _ = step(plain, BATCH)
            with timed(watched):
                watched, _ = step(watched, BATCH)
            assert (timed.last is None) == (i == 0)  # calls 2 and 4
        plain, _ = step(plain, BATCH)
        watched, _ = fds.trace(step, watched, BATCH, tmp_path / "trace.json")
        assert all(
            bits(a).equal(bits(b)) for a, b in zip(fds.tree.leaves(plain), fds.tree.leaves(watched), strict=True)
        )
        return timed.last.parts

    for parts in fds.simulate(run, 2):
        assert set(parts) == set(PARTS) and all(parts[name] > 0 for name in PARTS if name != "offload")


def test_what_is_captured_is_not_timed_and_a_gpu_is_not_waited_for():
    made = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing
            self.at = len(made)
            made.append(self)

        record = mock.Mock()
        query = mock.Mock(return_value=False)

        def elapsed_time(self, other):
            return 2.0 * (other.at - self.at)

    step = make()
    state = step.init(make_params())
    gpu = mock.patch.object(_timed, "Clock", return_value=Clock(torch.device("cuda", 0)))
    capturing = mock.patch("torch.cuda.is_current_stream_capturing", return_value=False)
    with mock.patch("torch.cuda.Event", Event), mock.patch("torch.cuda.current_stream"), gpu, capturing as captures:
        timed = fds.timed()
        with timed(state), profiled("forward"):
            captures.return_value = True
            with profiled("backward"):
                pass
            captures.return_value = False
    assert timed.metrics() == {} and len(made) == 4
    Event.query.return_value = True
    assert timed.last.parts == dict.fromkeys(PARTS, 0.0) | {"other": 4.0, "forward": 2.0}


def test_a_trace_has_a_process_for_each_rank_with_its_parts_and_messages(tmp_path):
    path = tmp_path / "new" / "trace.json"

    def run():
        mesh = fds.mesh(pp=2)
        layers = fds.Layers([nn.Linear(3, 4), nn.Linear(4, 2)], nn.MSELoss())
        step = fds.compose(fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=2), fds.adamw())(layers)
        fds.trace(step, step.init(layers.init), (BATCH["x"], BATCH["y"]), path)

    fds.simulate(run, 2)
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 1"]
    for rank in (0, 1):
        slices = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        names = {event["name"] for event in slices}
        assert {f"{part}/stage{rank}/microbatch{i}" for part in ("forward", "backward") for i in (0, 1)} < names
        assert {"step", "optimizer"} < names and any(name.startswith("wait/recv") for name in names)
        whole = next(event for event in slices if event["name"] == "step")
        end = whole["ts"] + whole["dur"] + 1e-3
        assert all(whole["ts"] <= event["ts"] and event["ts"] + event["dur"] <= end for event in slices)
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0


def test_clocks_of_several_machines_are_aligned(monkeypatch):
    def ahead():
        axis = fds.mesh(ranks=-1)["ranks"]
        return _timed._measure_ahead(axis)

    rank = lambda: fds.mesh(ranks=-1)["ranks"].index
    assert fds.simulate(ahead, 2) == [0, 0]  # on one machine the clock is one, to the last bit
    monkeypatch.setattr(_timed, "_BOOT", mock.Mock(exists=lambda: True, read_text=lambda: f"machine {rank()}"))
    monkeypatch.setattr(_timed, "time", mock.Mock(perf_counter=lambda: time.perf_counter() + 1000 * rank()))
    zero, other = fds.simulate(ahead, 2)
    assert zero == 0 and other == pytest.approx(1000, abs=1)


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (lambda: fds.timed(every=0), "every"),
        (lambda: fds.timed(samples=0), "samples"),
        (lambda: fds.timed(tokens=True), "tokens"),
        (lambda: fds.timed(flops=float("inf")), "flops"),
        (lambda: fds.timed(flops=float("nan")), "flops"),
        (lambda: fds.timed(peak_flops=1e12), "peak_flops"),
        (lambda: fds.timed()(None).__enter__(), "timed"),
        (lambda: fds.trace(None, None, None, "x"), "trace"),
        (lambda: fds.trace(make(), None, None, "x"), "trace"),
        (lambda: fds.trace(make(), make().init(make_params()), BATCH, Path("/dev/null/x")), "/dev/null/x"),
        (lambda: fds.trace(make(), make().init(make_params()), BATCH, None), "None"),
    ],
)
def test_arguments_of_another_kind_are_refused(wrong, where):
    with pytest.raises(FdsError) as refused:
        wrong()
    assert where in refused.value.where


def test_wall_clock_breakdown_times_the_calls_that_are_printed():
    json_ = {"train_batch_size": 8, "wall_clock_breakdown": True}
    mesh = fds.mesh(dp=1)
    none = fds.config.TrainingConfig.of({"train_batch_size": 8}).timed(mesh)
    step = make()
    with none(state := step.init(make_params())):
        step(state, BATCH)
    assert none.last is None and none.metrics() == {}
    assert fds.config.TrainingConfig.of(json_).timed(mesh).every == 1
    timed = fds.config.TrainingConfig.of({**json_, "steps_per_print": 10}).timed(mesh)
    assert timed.every == 10 and timed._amounts == {"samples": 8} and timed._layers is False


def test_the_profile_of_checkpointing_times_layers_also_where_they_run_again():
    json_ = {"train_batch_size": 8, "activation_checkpointing": {"profile": True}}
    timed = fds.config.TrainingConfig.of(json_).timed(fds.mesh(dp=1))
    loss = fds.Layers([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)], torch.nn.functional.mse_loss)
    step = fds.compose(fds.checkpoint_activations(), fds.sgd(0.1))(loss)
    with timed(state := step.init(loss.init)):
        step(state, (torch.ones(8, 3), torch.zeros(8, 3)))
    assert timed.every == 1
    assert all(
        found.forward > 0 and found.recomputed > 0 and found.backward > 0 for found in timed.last.layers.values()
    )


def test_waiting_for_what_lives_elsewhere_is_a_part_of_its_own(tmp_path):
    step = make(fds.offload(moments=fds.disk(tmp_path)), fds.donate())
    timed, state = fds.timed(), step.init(make_params())
    with timed(state):
        step(state, BATCH)
    assert timed.last.parts["offload"] > 0 and timed.last.parts["optimizer"] > 0


def test_the_slowest_rank_is_the_one_that_is_busy_and_not_those_that_wait_for_it():
    def run():
        rank = fds.mesh(ranks=-1)["ranks"].index
        state, timed = make().init(make_params()), fds.timed()
        early = timed.of_ranks()
        assert (early.ranks, early.parts, early.straggler) == ((None,) * 3, {}, None)
        if rank < 2:  # of the third none have arrived
            with mock.patch.object(_timed, "Clock", Told), timed(state):
                with profiled("forward"):
                    Told.now += 10 + 20 * rank
                with profiled("wait/x"):
                    Told.now += 25 - 20 * rank
        return timed.of_ranks()

    for found in fds.simulate(run, 3):
        parts = found.parts
        assert attrs.astuple(parts["forward"]) == pytest.approx((10, 20, 30, 1))
        assert attrs.astuple(parts["wait"]) == pytest.approx((5, 15, 25, 0))
        assert attrs.astuple(parts["call"])[:3] == pytest.approx((35, 35, 35)) and found.ranks[2] is None
        assert found.straggler == parts["busy"].slowest == 1
        lines = str(found).splitlines()
        assert lines[0].split()[-1] == "rank" and "busy" in lines[2] and len(lines) == 1 + 2 + len(PARTS)


class Told(Clock):
    """A clock that every rank sets by itself."""

    now = 0.0

    def mark(self, name):
        self.marks.append((name, Told.now / 1e3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_peak_is_measured_by_products_of_matrices(dtype):
    ticks = Ticks()

    def mm(a, b):
        ticks.spend(next(spent))
        return a

    spent = iter([50, 9, 8, 4, 16, 8])
    with mock.patch.object(torch, "mm", mm), mock.patch.object(time, "perf_counter", ticks):
        assert fds.timing.peak_flops(dtype) == pytest.approx(2 * 1024**3 / 4e-3)


@pytest.mark.parametrize(
    "wrong", [{"dtype": torch.int8}, {"dtype": "float32"}, {"device": "moon"}, {"device": "cuda:99"}]
)
def test_a_peak_of_what_multiplies_nothing_is_refused(wrong):
    with pytest.raises(FdsError):
        fds.timing.peak_flops(**wrong)
