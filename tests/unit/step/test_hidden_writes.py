"""What a loss writes through `.data`, which leaves no version: found in its first call, of evaluation too."""

import pytest
import torch
from torch import nn

import fds
from fds.errors import LossError

X = torch.arange(6.0).view(2, 3)


class Clipping(nn.Linear):
    """Clips its weights in forward, as Wasserstein critics do."""

    def forward(self, x):
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Replacing(nn.Linear):
    def forward(self, x):
        self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


def halve_inputs(p, x):
    x.data.mul_(0.5)
    return (x @ p["weight"]).sum()


def clip(p, x):
    p["weight"].data.neg_()  # of the same norm
    return (x @ p["weight"]).sum()


def of(module):
    apply = fds.functional(module)[0]
    return lambda p, x: apply(p, x).sum()


LOSSES = {
    "parameter": (clip, "params.weight"),
    "batch": (halve_inputs, "batch"),
    "module": (of(Clipping(3, 3, bias=False)), "params.weight"),
    "replaced": (of(Replacing(3, 3, bias=False)), "params.weight"),
}


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_written_through_data_is_refused(name, dtype, evaluates):
    loss, where = LOSSES[name]
    precision = [] if dtype is torch.float32 else [fds.precision(dtype)]
    step = fds.compose(*precision, fds.sgd(0.1))(loss)
    state = step.init({"weight": torch.ones(3, 3)})
    with pytest.raises(LossError, match="writes over what it is given") as error:
        step.evaluate(state, X.clone()) if evaluates else step(state, X.clone())
    assert error.value.where == where


@pytest.mark.parametrize("stage", [0, 1])
def test_so_it_is_in_any_stage_of_a_pipeline(stage):
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    layers[stage] = Clipping(3, 3)
    layers = fds.Layers(layers, lambda out, targets: (out - targets).pow(2).mean())
    step = fds.compose(fds.pipeline(fds.plans.gpipe, 2, num_microbatches=2), fds.sgd(0.1))(layers)
    state = step.init({name: x + 1 for name, x in layers.init(fds.random.key(0)).items()})
    with pytest.raises(LossError, match="writes over what it is given"):
        step(state, (X, X))


def test_values_are_compared_in_the_first_call_alone():
    step = fds.compose(fds.accumulate(2), fds.sgd(0.1))(lambda p, x: (p["w"] * x).sum())
    state = step.init({"w": torch.ones(3)})
    summed = []
    for _ in range(3):
        with torch.profiler.profile() as told:
            step(state, X)
        summed.append(sum(event.name == "aten::sum" for event in told.events()))
    assert summed[0] == summed[1] + 4 and summed[1] == summed[2], "of parameters and batch, before and after"
