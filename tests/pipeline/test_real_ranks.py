"""A small GPT on gloo processes, pipeline x data: what one process trains, and how every rank hears of a failure."""

import functools
import os
import signal
import time

import pytest
import torch
import torch.nn.functional as F

import fds
from examples.gpt.model import gpt
from fds import plans
from fds.errors import BatchError, RankError
from tests import ranks
from tests.bits import assert_same_bits
from tests.pipeline.test_failures import Mine, batch, boom, ended, mined
from tests.sharding.models import largest_difference

STEPS, EPS, LR, MICROBATCHES = 4, 1e-2, 1e-3, 4
SCHEDULES = {
    "one_f_one_b": plans.one_f_one_b,
    "zb_h1": plans.zb_h1,
    "interleaved": plans.interleaved(2),
    "zb_v": plans.zb_v,
}


def texts(seed: int, rows: int = 2 * MICROBATCHES, length: int = 6):
    data = torch.randint(0, 256, (rows, length + 1), generator=torch.Generator().manual_seed(seed))
    return data[:, :-1], data[:, 1:]


def model() -> fds.Layers:
    return gpt(width=16, layers=4, heads=2)


def train(*transforms, mine=lambda batch: batch, outputs: bool = True):
    """Train in float64, each rank with its rows; return whole parameters, the last metrics, an evaluation, outputs."""
    loss = model()
    doubled = {name: x.double() for name, x in loss.init(fds.random.key(1)).items()}
    for name, x in doubled.items():  # a fresh block is the identity: nothing would flow through it
        if name.endswith(("merge.weight", "down.weight")):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(len(name)), dtype=x.dtype) * 0.1)
    step = fds.compose(*transforms, fds.clip_by_global_norm(0.5), fds.adamw(LR, eps=EPS))(loss)
    state = step.init(doubled, key=3)
    for i in range(STEPS):
        state, metrics = step(state, mine(texts(i)))
    evaluated = step.evaluate(state, mine(texts(9)), outputs=True)
    return step.params(state), metrics, evaluated["loss"], evaluated["outputs"]


def pipelined(name: str, stage: int):
    mesh = fds.mesh(pp=2, dp=2)
    data = mesh["dp"]
    mine = lambda batch: fds.tree.map(lambda x: x.chunk(2)[data.index], batch)
    pipeline = fds.pipeline(SCHEDULES[name], mesh["pp"], num_microbatches=MICROBATCHES)
    return *train(pipeline, fds.shard_optimizer(data, stage=stage, bucket_bytes=1 << 14), mine=mine), data.index


@functools.cache
def on_one_process():
    return train(fds.accumulate(MICROBATCHES))


@pytest.mark.parametrize(("name", "stage"), [(name, i) for i, name in enumerate(SCHEDULES)])
def test_pipeline_times_data_on_processes_is_one_process(name, stage):
    """Every schedule and every stage once: law 5 holds all of them on simulated ranks.

    The bound is that of tests/sharding/test_gpt_on_real_ranks.py, for fewer and shorter sums.
    """
    want, metrics, evaluated, outputs = on_one_process()
    bound = torch.finfo(torch.float64).eps * 2**15 * LR / EPS * sum(2.0**i for i in range(STEPS))
    start = model().init(fds.random.key(1))["embedding.weight"].double()
    assert float((want["embedding.weight"] - start).abs().max()) > 1e4 * bound  # so that the bound says something

    found = fds.simulate(functools.partial(pipelined, name, stage), 4)
    for params, told, loss, shown, data in found:
        assert largest_difference(params, want) <= bound
        assert abs(float(told["loss"] - metrics["loss"])) <= bound
        assert abs(float(told["grad_norm"] - metrics["grad_norm"])) <= 100 * bound
        assert abs(float(loss - evaluated)) <= bound
        assert float((shown - outputs.chunk(2)[data]).abs().max()) <= 100 * bound
    for one in found[1:]:
        assert_same_bits(one[:3], found[0][:3])
    on_processes = ranks.run(pipelined, name, stage, world_size=4)
    assert_same_bits([one[:4] for one in on_processes], [one[:4] for one in found])
    assert [one[4] for one in on_processes] == [one[4] for one in found]


def recorded(name: str):
    """Return what this rank did in a second step, when everything has been met once."""
    axis = fds.mesh(pp=2)["pp"]
    loss = model()
    step = fds.compose(fds.pipeline(SCHEDULES[name], axis, num_microbatches=MICROBATCHES), fds.sgd(0.1))(loss)
    state, _ = step(step.init(loss.init), texts(0))
    with plans.record() as recording:
        step(state, texts(1))
    return recording.json()


@pytest.mark.parametrize("name", SCHEDULES)
def test_processes_hold_as_many_live_microbatches_as_the_simulator_says(name):
    plan = plans.Plan.of(SCHEDULES[name](2, MICROBATCHES))
    want = plans.simulate(plan).peak_live
    assert plans.joined(ranks.run(recorded, name)).peak_live == want
    assert plans.joined(fds.simulate(lambda: recorded(name), 2)).peak_live == want


def stumbling(name: str, place: tuple, microbatch: int, stage: int, good: int):
    """Blow up in one of two pipelines; step on after it. Return the error and where training led, and the same
    without the failure."""
    mesh = fds.mesh(pp=2, dp=2)
    led = []
    for stumbles in (True, False):
        mine = Mine()
        loss = mined(mine)
        pipeline = fds.pipeline(SCHEDULES[name], mesh["pp"], num_microbatches=MICROBATCHES, partition="uniform")
        shard = fds.shard_optimizer(mesh["dp"], stage=stage, bucket_bytes=64)
        step = fds.compose(pipeline, shard, fds.adamw(0.01), fds.donate())(loss)
        state = step.init(loss.init, key=1)
        for i in range(good):
            state, _ = step(state, batch(i))
        if stumbles:
            if mesh["dp"].index == 1:
                mine.arm(place, microbatch, boom())
            error = ended(lambda step=step, state=state: step(state, batch(good)))
            mine.disarm()
        for i in range(good, good + 2):
            state, metrics = step(state, batch(i))
        led.append((step.params(state), metrics))
    return type(error).__name__, str(error), *led


PLACES = {  # where it blows up, at which microbatch, after how many good steps
    "forward of the first stage, at once": ((0, "forward"), 0, 0),
    "forward of the last stage": ((5, "forward"), 2, 1),
    "criterion": (("criterion", "forward"), 1, 0),
    "backward of the first stage": ((1, "backward"), 1, 1),
    "backward of the last stage, at once": ((5, "backward"), 0, 0),
    "the weight half, at the end": ((2, "weight"), 3, 1),
}


# Every place and every stage, with either schedule: simulated ranks meet them together.
@pytest.mark.parametrize(("where", "stage"), [(x, i % 4) for i, x in enumerate(PLACES)])
def test_a_failure_in_one_of_two_pipelines_of_processes_ends_all_with_one_error(where, stage):
    place, microbatch, good = PLACES[where]
    name = "zb_h1" if place[1] == "weight" or stage % 2 else "one_f_one_b"
    found = ranks.run(stumbling, name, place, microbatch, stage, good, world_size=4, timeout=10.0)
    layer = 5 if place[0] == "criterion" else place[0]
    for kind, text, after, want in found:
        assert kind == "RankError" and text == found[0][1]
        assert f"stage {layer // 3}, " in text and f"of microbatch {microbatch}\n" in text
        assert "ZeroDivisionError: boom" in text
        assert_same_bits(after, want)


def another_shape(name: str):
    """Pad the second microbatch more than the first; then give a batch that does not divide."""
    axis = fds.mesh(pp=2)["pp"]
    count = iter(range(1000))
    grows = lambda x: F.pad(x, (0, next(count) % MICROBATCHES))
    layers = [grows, lambda x: x * 2, lambda x: x[:, :4], fds.LayerSpec(torch.nn.Linear, 4, 4)]
    loss = fds.Layers(layers, torch.nn.MSELoss())
    pipeline = fds.pipeline(SCHEDULES[name], axis, num_microbatches=MICROBATCHES, partition=[0, 2, 4])
    step = fds.compose(pipeline, fds.sgd(0.1))(loss)
    state = step.init(loss.init)
    errors = [ended(lambda: step(state, batch(0))), ended(lambda: step(state, None if axis.index else batch(0, 7)))]
    return [(isinstance(error, BatchError), str(error)) for error in errors]


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1"])
def test_a_microbatch_of_another_shape_and_a_batch_that_does_not_divide_end_all_processes(name):
    one, other = ranks.run(another_shape, name, timeout=10.0)
    assert one == other
    (shape, shape_text), (rows, rows_text) = one
    assert shape and "stage 0, output of microbatch 1" in shape_text and "dynamic_shapes=True" in shape_text
    assert rows and "7 rows" in rows_text


def interrupted(kind: str):
    axis = fds.mesh(pp=3)["pp"]
    mine = Mine()
    loss = mined(mine)
    step = fds.compose(fds.pipeline(plans.zb_h1, axis, num_microbatches=MICROBATCHES), fds.sgd(0.1))(loss)
    state, _ = step(step.init(loss.init), batch(0))
    mine.arm((2, "forward"), 1, {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit}[kind]())
    start = time.monotonic()
    error = ended(lambda: step(state, batch(1)))
    return type(error).__name__, str(error), time.monotonic() - start < 8


@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit"])
def test_an_interrupt_of_one_process_ends_the_others_within_the_timeout(kind):
    first, middle, last = ranks.run(interrupted, kind, world_size=3, timeout=6.0)
    assert middle[0] == kind
    for name, text, soon in (first, last):
        assert name == "RankError" and "rank 1" in text and soon, (first, last)


class Deadly(Mine):
    """Instead of raising, the process dies."""

    def visit(self, *place) -> None:
        if ended(lambda: Mine.visit(self, *place)):
            os.kill(os.getpid(), signal.SIGKILL)


def killed(place: tuple, microbatch: int, stage: int):
    """Kill rank 1, the second data coordinate of the first stage, in the middle of its second step."""
    fds.init_distributed(timeout=20)
    mesh, mine = fds.mesh(pp=2, dp=2), Deadly()
    loss = mined(mine)
    pipeline = fds.pipeline(plans.zb_h1, mesh["pp"], num_microbatches=MICROBATCHES, partition="uniform")
    step = fds.compose(pipeline, fds.shard_optimizer(mesh["dp"], stage=stage, bucket_bytes=64), fds.sgd(0.1))(loss)
    state, _ = step(step.init(loss.init), batch(0))
    if mesh.rank == 1:
        mine.arm(place, microbatch, boom())
    start = time.monotonic()
    try:
        step(state, batch(1))
        print("went on")
    except RankError as error:
        print("RankError", error, "at once" if time.monotonic() - start < 15 else "late")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("place", [(0, "forward"), (2, "weight")], ids=str)
def test_a_process_that_is_killed_in_a_step_is_named_by_the_others(place, stage):
    results = ranks.spawn(killed, place, 1, stage, world_size=4)
    assert [code for code, _ in results] == [0, -signal.SIGKILL, 0, 0], results
    for rank, (_, text) in enumerate(results):
        if rank != 1:
            assert "RankError" in text and "at once" in text and "went on" not in text, (rank, text)
    assert any("rank 1 was lost" in text for _, text in results), results


def composed(kind: str):
    axis = fds.mesh(pp=2)["pp"]
    i = axis.index
    made = {
        "schedule": lambda: fds.pipeline((plans.gpipe, plans.one_f_one_b)[i], axis, num_microbatches=4),
        "partition": lambda: fds.pipeline(plans.gpipe, axis, num_microbatches=4, partition=([0, 3, 6], [0, 2, 6])[i]),
        "nothing": lambda: fds.pipeline(plans.gpipe, axis, num_microbatches=4),
    }[kind]()
    loss = mined(Mine())
    step = fds.compose(made, fds.sgd(0.1))(loss)
    params = loss.init(fds.random.key(i))
    if i:
        params = {name: x.to("meta") for name, x in params.items()}
    error = ended(lambda: step.init(params))
    return type(error).__name__, str(error), None if error else step.params(step.init(params))


@pytest.mark.parametrize("kind", ["schedule", "partition"])
def test_processes_that_composed_different_pipelines_are_told_at_init(kind):
    one, other = ranks.run(composed, kind, timeout=10.0)
    assert one == other and one[0] == "ComposeError" and "composed different steps" in one[1]


def test_other_processes_than_the_first_may_have_no_values():
    want = mined(Mine()).init(fds.random.key(0))
    for _, _, params in ranks.run(composed, "nothing", timeout=10.0):
        assert_same_bits(params, want)
