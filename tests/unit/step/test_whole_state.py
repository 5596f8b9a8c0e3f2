"""Every part of a state is looked at before a step does anything: shape, dtype, device, names."""

import attrs
import pytest
import torch

import fds
from fds import tree
from fds.errors import StateError
from tests.bits import assert_same_bits, snapshot
from tests.unit.step.problem import BATCH, make, make_params

OPTIMIZERS = [fds.adamw(0.1), fds.sgd(0.1, momentum=0.9), fds.adagrad(0.1), fds.lion(0.1), fds.lamb(0.1)]
CHANGES = {
    "one more row": lambda x: x.new_zeros((*x.shape[:-1], x.shape[-1] + 1) if x.dim() else (1,)),
    "far larger": lambda x: x.new_zeros(5000, 4),
    "turned": lambda x: x.t().contiguous() if x.dim() == 2 else x[None],
    "another dtype": lambda x: x.to(torch.float16),
    "no tensor": lambda x: 3.0,
}


def loss_fn(params, batch, buffers):
    out = batch["x"] @ params["net"]["w"] + params["net"]["b"]
    return (out - batch["y"]).pow(2).mean(), {}, {"seen": buffers["seen"] + 1}


def make_step(*more):
    loss = fds.with_buffers(loss_fn, {"seen": torch.zeros(2)})
    return make(fds.ema(0.9), fds.loss_scale(), *more, loss=loss)


def replaced(state, path, change):
    named = tree.paths(state)
    return tree.flatten(state)[1]([change(x) if name == path else x for name, x in named.items()])


PATHS = [path for path in tree.paths(make_step().init(make_params())) if not path.startswith("params.")]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("path", PATHS)
def test_a_part_of_another_kind_is_refused_by_name(path, change):
    step = make_step()
    state = step.init(make_params())
    broken = replaced(state, path, CHANGES[change])
    before = snapshot(state)
    with pytest.raises(StateError) as caught:
        step(broken, BATCH)
    assert caught.value.where == path
    assert_same_bits(state, before)
    step(state, BATCH)


@pytest.mark.parametrize("more", [(), (fds.donate(),)], ids=["pure", "donated"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("shape", [(2000, 2), (2, 2), (2, 3), (3, 3)])
def test_parameters_of_another_shape_than_their_moments_are_refused(optimizer, shape, more):
    step = make(*more, optimizer=optimizer, loss=lambda p, batch: p["net"]["w"].sum() * batch["x"].mean())
    state = step.init(make_params())
    state, _ = step(state, BATCH)  # also when the step knows the state's structure already
    w = torch.randn(shape)
    with pytest.raises(StateError, match="opt"):
        step(attrs.evolve(state, params={**state.params, "net": {"w": w, "b": torch.zeros(2)}}), BATCH)
    state.check("be used again")


def test_the_order_of_names_in_the_state_does_not_matter():
    step = make_step()
    state = step.init(make_params())
    turn = lambda named: dict(reversed(named.items()))
    opt = turn({slot: turn(named) for slot, named in state.opt.items()})
    assert_same_bits(
        dict(sorted(step(attrs.evolve(state, opt=opt), BATCH)[0].opt.items())),
        dict(sorted(step(state, BATCH)[0].opt.items())),
    )
