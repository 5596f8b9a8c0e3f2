"""Views of parameters in a pipeline: their backward runs once a microbatch, however the layers' backward is cut."""

import pytest
import torch
from torch import nn

import fds
from fds import plans
from tests.bits import assert_rounding

ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.ones(8, 6)
SCHEDULES = {"gpipe": plans.gpipe, "1f1b": plans.one_f_one_b, "zb_h1": plans.zb_h1}


@fds.step.transform
def squared(counts):
    """Show the loss the square of every trained matrix, which saves it for backward; count backwards."""

    def view(x, leaf, call):
        if not x.requires_grad or len(leaf.shape) < 2:
            return x
        seen = x * x
        seen.register_hook(lambda grad: counts.update({leaf.name: counts.get(leaf.name, 0) + 1}))
        return seen

    return lambda step: fds.step.fill(step, view=view)


def layers():
    tied = lambda: fds.TiedLayerSpec("w", nn.Linear, 6, 6)
    return fds.Layers([tied(), torch.tanh, fds.LayerSpec(nn.Linear, 6, 6), torch.tanh, tied()], nn.MSELoss())


def trained(*more):
    counts, loss = {}, layers()
    step = fds.compose(*more, squared(counts), fds.sgd(0.5))(loss)
    state = step.init(loss.init, key=1)
    for _ in range(2):
        state, _ = step(state, ROWS)
    return step.params(state), counts


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_view_that_saves_tensors_is_accumulation(name, ranks):
    want, counts = trained(fds.accumulate(4))
    assert counts == {"w.weight": 8, "2.weight": 8}, "one backward a microbatch"

    def run():
        axis = 2 if ranks == 1 else fds.mesh(pp=2)["pp"]
        return trained(fds.pipeline(SCHEDULES[name], axis, num_microbatches=4))

    for got, counts in [run()] if ranks == 1 else fds.simulate(run, 2):
        assert_rounding(got, want, additions=4096)
        uses = {"w.weight": 2, "2.weight": 1} if ranks == 1 else dict.fromkeys(counts, 1)  # stages that hold it
        assert counts == {name: 8 * uses[name] for name in counts}


def test_what_a_view_made_for_two_layers_of_a_stage_goes_back_once():
    want, _ = trained(fds.accumulate(4))
    got, counts = trained(fds.pipeline(plans.zb_h1, 1, num_microbatches=4))  # B and W of every layer by itself
    assert_rounding(got, want, additions=4096)
    assert counts == {"w.weight": 8, "2.weight": 8}
