"""What a profiler shows of a step: named ranges, one inside the other as the parts of the step are."""

import pytest
import torch
from torch import nn

import fds
from tests.unit.step.problem import BATCH, make, make_params


def ranges(step, state, batch):
    """The ranges of one step, as (names from the outermost in)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as record:
        step(state, batch)
    found = []
    for event in record.events():
        path, one = [], event
        while one is not None:
            path += [one.name] if one.name.startswith("fds::") else []
            one = one.cpu_parent
        if event.name.startswith("fds::"):
            found.append(tuple(reversed(path)))
    return found


def test_a_plain_step_shows_its_parts_in_order():
    step = make(fds.accumulate(2))
    found = ranges(step, step.init(make_params()), BATCH)
    parts = ["gather", "forward", "backward", "forward", "backward", "reduce", "optimizer"]
    assert found == [(f"fds::{part}",) for part in parts]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_sharded_step_shows_what_ranks_do_inside_forward_and_backward(stage):
    def run():
        axis = fds.mesh(dp=-1)["dp"]
        step = make(fds.shard_optimizer(axis, stage=stage))
        state, _ = step(step.init(make_params()), BATCH)
        return ranges(step, state, BATCH) if axis.index == 0 else step(state, BATCH) and None

    found = fds.simulate(run, 2)[0]
    assert [path for path in dict.fromkeys(found) if len(path) == 1] == [
        ("fds::gather",),
        ("fds::forward",),
        ("fds::backward",),
        ("fds::reduce",),
        ("fds::optimizer",),
    ]
    assert ("fds::backward", "fds::reduce") in found
    assert (("fds::forward", "fds::gather") in found) == (stage == 3)


def test_a_pipeline_shows_stages_and_microbatches():
    layers = fds.Layers([nn.Linear(3, 4), nn.Linear(4, 2)], nn.MSELoss())
    step = fds.compose(fds.pipeline(fds.plans.one_f_one_b, 2, num_microbatches=2), fds.adamw())(layers)
    found = ranges(step, step.init(layers.init), (BATCH["x"], BATCH["y"]))
    want = {f"fds::{part}/stage{s}/microbatch{i}" for part in ("forward", "backward") for s in (0, 1) for i in (0, 1)}
    assert want | {"fds::gather", "fds::reduce", "fds::optimizer"} == {path[0] for path in found}


def test_without_a_profiler_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(torch.profiler, "record_function", None)  # calling it would raise
    step = make()
    step(step.init(make_params()), BATCH)
