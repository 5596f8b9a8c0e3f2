"""Clipping, averaging, freezing: each against what PyTorch users write by hand."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

import fds
from fds import tree
from fds.errors import ComposeError, StateError
from tests.bits import assert_rounding, assert_same_bits
from tests.laws.problems import OPTIMIZERS, make, problems


def problem():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    return net, *fds.functional(net)[:2], (torch.randn(8, 5) * 4, torch.randn(8, 3) * 4)


@given(st.floats(1e-3, 1e3), st.sampled_from([1, 2, 4]), st.booleans())
def test_clipping_by_norm_equals_clip_grad_norm(max_norm, n, scaled):
    net, apply, params, batch = problem()
    scale = [fds.loss_scale()] if scaled else []
    step = fds.compose(*scale, fds.accumulate(n), fds.clip_by_global_norm(max_norm), fds.sgd(1.0))(
        lambda p, b: F.mse_loss(apply(p, b[0]), b[1])
    )
    state, metrics = step(step.init(params), batch)
    F.mse_loss(net(batch[0]), batch[1]).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), max_norm)
    torch.optim.SGD(net.parameters(), 1.0).step()
    assert float(metrics["grad_norm"]) == pytest.approx(float(norm), rel=1e-6)
    biggest = max(float(p.detach().abs().max()) for p in net.parameters())
    assert_rounding(list(state.params.values()), [p.detach() for p in net.parameters()], additions=64, scale=biggest)


@given(st.floats(1e-3, 10), st.booleans())
def test_clipping_by_value_equals_clip_grad_value(bound, scaled):
    net, apply, params, batch = problem()
    scale = [fds.loss_scale()] if scaled else []
    step = fds.compose(*scale, fds.clip_by_value(bound), fds.sgd(1.0))(lambda p, b: F.mse_loss(apply(p, b[0]), b[1]))
    state, _ = step(step.init(params), batch)
    F.mse_loss(net(batch[0]), batch[1]).backward()
    nn.utils.clip_grad_value_(net.parameters(), bound)
    torch.optim.SGD(net.parameters(), 1.0, fused=True).step()
    assert_same_bits(list(state.params.values()), [p.detach() for p in net.parameters()])


def test_clips_run_in_the_order_of_the_composition():
    def loss(params, batch):
        return (params["w"] * batch).sum()

    batch, params = torch.tensor([3.0, 4.0]), {"w": torch.zeros(2)}
    value_first = fds.compose(fds.clip_by_value(3.0), fds.clip_by_global_norm(1.0), fds.sgd(1.0))(loss)
    norm_first = fds.compose(fds.clip_by_global_norm(1.0), fds.clip_by_value(3.0), fds.sgd(1.0))(loss)
    moved, told = value_first(value_first.init(params), batch)
    assert torch.allclose(moved.params["w"], -torch.tensor([3.0, 3.0]) / 18**0.5)
    assert float(told["grad_norm"]) == 5.0
    moved, _ = norm_first(norm_first.init(params), batch)
    assert torch.allclose(moved.params["w"], -torch.tensor([0.6, 0.8]))


def test_the_average_follows_the_parameters():
    _, apply, params, batch = problem()
    step = fds.compose(fds.sgd(0.1), fds.ema(0.75), fds.ema(0.5, name="fast"))(
        lambda p, b: F.mse_loss(apply(p, b[0]), b[1])
    )
    state = step.init(params)
    slow = fast = {k: v.clone() for k, v in params.items()}
    for _ in range(3):
        state, _ = step(state, batch)
        slow = {k: slow[k].lerp(p, 0.25) for k, p in state.params.items()}
        fast = {k: fast[k].lerp(p, 0.5) for k, p in state.params.items()}
    assert_same_bits((state.slots["ema"], state.slots["fast"]), (slow, fast))
    assert step.evaluate(attrs.evolve(state, params=state.slots["ema"]), batch)["loss"].isfinite()


@given(problems(), st.sampled_from(sorted(OPTIMIZERS)))
def test_frozen_parameters_cost_nothing_and_change_nothing_else(problem, name):
    frozen = next(iter(tree.paths(problem.params)))
    if name == "groups":
        return
    plain, step = make([], OPTIMIZERS[name](), problem), make([], OPTIMIZERS[name](), problem, fds.freeze(frozen))
    (a, _), (b, _) = plain(plain.init(problem.params), problem.batch), step(step.init(problem.params), problem.batch)
    assert_same_bits(tree.paths(b.params)[frozen], tree.paths(problem.params)[frozen])
    rest = lambda s: {k: v for k, v in tree.paths(s.params).items() if k != frozen}
    assert_same_bits(rest(b), rest(a))
    assert all(frozen not in slot for slot in b.opt.values())
    told = step.describe(b, problem.batch)
    size = tree.paths(problem.params)[frozen].numel() * 4
    assert frozen in told.frozen and told.num_bytes["gradients"] == plain.describe(a).num_bytes["gradients"] - size


def test_frozen_leaves_get_no_gradient():
    seen = {}

    def loss(params, batch):
        seen.update({k: v.requires_grad for k, v in params.items()})
        return (params["a"] * params["b"] * batch).sum()

    step = fds.compose(fds.freeze("a"), fds.sgd(0.1))(loss)
    step(step.init({"a": torch.ones(2), "b": torch.ones(2)}), torch.ones(2))
    assert seen == {"a": False, "b": True}


@pytest.mark.parametrize("stage", [0, 2])
def test_all_but_some_are_frozen(stage):
    params = {name: torch.ones(4) for name in ("base.w", "base.lora_A", "head", "base.lora_B")}

    def run(*frozen):
        step = fds.compose(*frozen, fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage), fds.adam(0.1))(
            lambda p, b: sum((x * b).sum() for x in p.values())
        )
        state, _ = step(step.init(params), torch.ones(()))
        return step.describe(state).frozen, step.params(state)

    (still, got), *_ = fds.simulate(lambda: run(fds.freeze(all_but=("*lora_*", "head"))), 2)
    want = fds.simulate(lambda: run(fds.freeze("base.w")), 2)[0]
    assert still == want[0] == ("base.w",) and all(torch.equal(got[name], x) for name, x in want[1].items())
    assert str(fds.freeze(all_but=("head",))) == "freeze(all_but=('head',))"


def test_bad_arguments_are_refused():
    for bad in (
        lambda: fds.clip_by_global_norm(0),
        lambda: fds.clip_by_value(-1.0),
        lambda: fds.ema(1.0),
        lambda: fds.freeze(),
        lambda: fds.freeze("a", all_but=("b",)),
        lambda: fds.freeze(all_but="head"),
        lambda: fds.freeze(all_but=(1,)),
        lambda: fds.accumulate(0),
        lambda: fds.accumulate(2.0),
        lambda: fds.autocast(torch.float32),
        lambda: fds.checkpoint_activations(store="disk"),
        lambda: fds.checkpoint_activations(every=0),
        lambda: fds.checkpoint_activations(policy="all"),
    ):
        with pytest.raises(ComposeError):
            bad()
    step = fds.compose(fds.freeze("embeding.*"), fds.sgd(0.1))(lambda p, b: p["embedding.w"].sum())
    with pytest.raises(StateError, match=r"embedding\.w"):
        step.init({"embedding.w": torch.ones(2)})
    step = fds.compose(fds.freeze(all_but=("haed",)), fds.sgd(0.1))(lambda p, b: p["head"].sum())
    with pytest.raises(StateError, match="did you mean 'head'"):
        step.init({"head": torch.ones(2)})
