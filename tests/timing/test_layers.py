"""`fds.timed(layers=)`: each layer's time, forward, recomputed and backward, and no other bit."""

import time
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks

import fds
from fds.errors import FdsError
from tests.bits import bits
from tests.timing.test_timed import Ticks

TICKS = Ticks()


class Spend(torch.autograd.Function):
    """Take so many milliseconds in forward, and ten times as many in backward."""

    @staticmethod
    def forward(ctx, x, ms):
        ctx.ms = ms
        ctx.save_for_backward(x)  # so that it is run again where nothing is kept
        TICKS.spend(ms)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        assert len(ctx.saved_tensors) == 1
        TICKS.spend(10 * ctx.ms)
        return grad, None


class Slow(nn.Module):
    """A layer of known time, which holds others."""

    def __init__(self, ms, *inner):
        super().__init__()
        self.ms, self.fc, self.inner = ms, nn.Linear(3, 3), nn.ModuleList(inner)

    def forward(self, x):
        x = Spend.apply(self.fc(x), self.ms)
        for one in self.inner:
            x = x + one(x=x)
        return Spend.apply(x, self.ms)


def times(step, params, layers, calls=1):
    state, timed = step.init(params, key=0), fds.timed(layers=layers)
    with mock.patch.object(time, "perf_counter", TICKS):
        for _ in range(calls):
            with timed(state):
                state, _ = step(state, (torch.ones(4, 3), torch.zeros(4, 3)))
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
    return {name: (x.forward, x.recomputed, x.backward) for name, x in timed.last.layers.items()}, timed


def near(found, want):
    assert found.keys() == want.keys()
    for name in want:
        assert found[name] == pytest.approx(want[name]), name


def test_layers_have_their_times_in_every_microbatch():
    layers = fds.Layers([Slow(1), Slow(2), nn.Identity(), Slow(4)], lambda out, y: Spend.apply(out, 100).sum())
    step = fds.compose(fds.accumulate(2), fds.sgd(lr=0.1))(layers)
    found, timed = times(step, layers.init, True, calls=2)
    near(found, {"0": (4, 0, 40), "1": (8, 0, 80), "2": (0, 0, 0), "3": (16, 0, 160)})
    assert timed.last.parts["forward"] == pytest.approx(228) and timed.last.parts["backward"] == pytest.approx(2280)
    assert timed.metrics()["layer_time_ms_3_backward"] == pytest.approx(160)
    assert [line.split()[0] for line in str(timed.last).splitlines()] == ["time", "layer", "0", "1", "2", "3"]


def test_what_is_run_again_is_told_apart():
    layers = fds.Layers([Slow(1), Slow(2)], lambda out, y: out.sum())
    found, timed = times(fds.compose(fds.checkpoint_activations(every=1), fds.sgd(lr=0.1))(layers), layers.init, True)
    near(found, {"0": (2, 2, 20), "1": (4, 4, 40)})
    assert timed.last.parts["backward"] == pytest.approx(66)


@pytest.mark.parametrize(
    ("layers", "want"),
    [
        (True, {"inner.0": (4, 0, 40), "inner.1": (14, 0, 140), "fc": (0, 0, 0)}),
        (["inner.?", "inner.1.inner.0"], {"inner.0": (4, 0, 40), "inner.1": (6, 0, 60), "inner.1.inner.0": (8, 0, 80)}),
        ([], {}),
        (False, {}),
    ],
)
def test_modules_of_a_functional_module_are_without_the_layers_inside_them(layers, want):
    apply, params, _ = fds.functional(Slow(1, Slow(2), Slow(3, Slow(4))))
    step = fds.compose(fds.sgd(lr=0.1))(lambda params, batch: apply(params, batch[0]).sum())
    near(times(step, params, layers)[0], want)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_whose_layers_are_timed_has_the_same_bits(stage):
    layers = fds.Layers([nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))], nn.MSELoss())
    batch = torch.ones(4, 3), torch.zeros(4, 4)

    def run():
        shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)
        step = fds.compose(fds.checkpoint_activations(), fds.accumulate(2), shard, fds.adamw(lr=0.1))(layers)
        plain = watched = step.init(layers.init, key=0)
        timed = fds.timed(every=2, layers=True)
        for _ in range(4):
            plain, _ = step(plain, batch)
            with timed(watched):
                watched, _ = step(watched, batch)
        assert all(bits(a).equal(bits(b)) for a, b in zip(*map(fds.tree.leaves, (plain, watched)), strict=True))
        return timed.last

    for last in fds.simulate(run, 2):
        found = list(last.layers.values())
        assert {"0", "1"} <= last.layers.keys() and sum(x.forward for x in found) <= last.parts["forward"]
        assert sum(x.backward + x.recomputed for x in found) <= last.parts["backward"]


@pytest.mark.parametrize("wrong", ["blocks.*", 1, [1], None])
def test_what_names_no_layers_is_refused(wrong):
    with pytest.raises(FdsError, match="layers"):
        fds.timed(layers=wrong)


def test_a_pattern_that_nothing_matches_is_refused_where_the_call_has_run():
    model = fds.Layers([nn.Linear(3, 3), nn.Sequential(nn.Tanh())], nn.MSELoss())
    step = fds.compose(fds.sgd(0.1))(model)
    state, batch, timed = (
        step.init(model.init, key=0),
        (torch.ones(2, 3), torch.zeros(2, 3)),
        fds.timed(layers=["1.00"]),
    )
    with pytest.raises(FdsError, match=r"'1\.0'"), timed(state):
        new, _ = step(state, batch)
    assert new.calls == 1 and not hooks._global_forward_hooks
    timed = fds.timed(layers=["1.*", "MSE*"])
    with timed(new):
        step(new, batch)
    assert list(timed.last.layers) == ["1.0", "MSELoss"]


def test_no_hook_is_left_behind():
    model = fds.Layers([torch.nn.Linear(3, 3)], torch.nn.MSELoss())
    step = fds.compose(fds.sgd(0.1))(model)
    state = step.init(model.init, key=0)
    timed = fds.timed(every=1, layers=True)
    with timed(state):
        step(state, (torch.ones(2, 3), torch.zeros(2, 3)))
    assert not torch.nn.modules.module._has_any_global_hook()
