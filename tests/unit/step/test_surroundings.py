"""What leaves a step has no graph and may be trained later, whatever surrounds the call: inference mode, gradients."""

import contextlib

import attrs
import pytest
import torch
from torch import nn

import fds
from fds import tree
from tests.bits import assert_same_bits

NET = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


def plain(*trees):
    """Say whether no tensor of these has a graph or was made in inference mode."""
    found = [x for x in tree.leaves(trees) if isinstance(x, torch.Tensor)]
    return bool(found) and not any(x.requires_grad or x.is_inference() for x in found)


def opaque():
    apply, params, buffers = fds.functional(NET)

    def loss(params, batch, buffers):
        out, buffers = apply.with_buffers(params, buffers, batch["x"])
        return out.square().mean() * batch["scale"], {"mean": out.mean()}, buffers

    return fds.with_buffers(loss, buffers), params, lambda x: {"x": x, "scale": fds.whole(x.new_ones(()))}


def layered():
    specs = [fds.LayerSpec(nn.Linear, 3, 4), fds.LayerSpec(nn.BatchNorm1d, 4), nn.Dropout(0.1)]
    layers = fds.Layers(specs, lambda out, y: (out - y).square().mean())
    return layers, layers.init, lambda x: (x, x.new_zeros(8, 1))


def everything(make, around, path, *transforms):
    """Return what every entry of fds gives, each called in a context of its own, and between them outside."""
    with around():
        loss, params, batch_of = make()
        step = fds.compose(*transforms, fds.clip_by_global_norm(1.0), fds.ema(0.9), fds.loss_scale(), fds.adamw(0.01))(
            loss
        )
        state = step.init(params, key=fds.random.key(0))
        batch = batch_of(X.clone())
    given = [state]
    for i in range(2):
        with around():
            state = tree.map(torch.clone, state)
        state, outside = step(state, batch)
        with around():
            state, inside = step(state, batch)
            found = step.evaluate(state, batch, outputs=True), step.evaluator(state)(batch), step.params(state)
            step.describe(state, batch), step.structure(params)
            if path is not None and not i:
                fds.save(path, state, step, tag="first")
                fds.save_async(path, state, step).wait()
                state, _ = fds.load(path, step, params)
                fds.export_weights(state, path / "weights.safetensors", None)
                given.append(fds.import_weights(path / "weights.safetensors", step, params))
        given += [state, outside, inside, found]
        assert plain(*given)
    return given


@pytest.mark.parametrize("transforms", [[], [fds.donate(), fds.accumulate(2)]], ids=["pure", "donated"])
@pytest.mark.parametrize("make", [opaque, layered])
def test_inference_mode_around_any_entry_changes_nothing(make, transforms):
    want = everything(make, contextlib.nullcontext, None, *transforms)
    assert_same_bits(everything(make, torch.inference_mode, None, *transforms), want)


def test_inference_mode_around_storage(tmp_path):
    want = everything(opaque, contextlib.nullcontext, tmp_path / "a")
    assert_same_bits(everything(opaque, torch.inference_mode, tmp_path / "b"), want)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_inference_mode_around_a_sharded_step(stage):
    def rank():
        shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)
        want = everything(opaque, contextlib.nullcontext, None, shard)
        assert_same_bits(everything(opaque, torch.inference_mode, None, shard), want)

    fds.simulate(rank, world_size=1)


def requiring_grad(x):
    return x.detach().clone().requires_grad_() if x.is_floating_point() else x


@pytest.mark.parametrize("transforms", [[], [fds.donate()], [fds.accumulate(2)]], ids=["pure", "donated", "summed"])
def test_a_state_whose_leaves_require_grad_makes_states_without_graphs(transforms):
    loss, params, batch_of = opaque()
    step = fds.compose(fds.freeze("0.bias"), *transforms, fds.ema(0.9), fds.loss_scale(), fds.adamw(0.01))(loss)
    state, batch = step.init(params), batch_of(X.clone().requires_grad_())
    want = step(tree.map(torch.clone, state), batch_of(X))
    state = tree.map(requiring_grad, state)
    evaluated, whole = step.evaluate(state, batch, outputs=True), step.params(state)
    found = step(state, batch)
    assert plain(found, evaluated, whole)
    assert_same_bits(found, want)
    assert batch["x"].grad is None


def test_an_eval_fn_that_enables_gradients_leaves_no_graph():
    apply, params, _ = fds.functional(nn.Linear(3, 1))

    def eval_fn(params, batch):
        with torch.enable_grad():
            out = apply(tree.map(lambda x: x.detach().requires_grad_(), params), batch)
        return out.mean(), {"out": out.sum()}

    step = fds.compose(fds.sgd(0.1))(lambda params, batch: apply(params, batch).mean(), eval_fn)
    assert plain(step.evaluate(step.init(params), X, outputs=True))


def test_repeated_steps_do_not_deepen_a_graph():
    step = fds.compose(fds.sgd(0.1))(lambda params, batch: (params["w"] * batch).mean())
    state = step.init({"w": torch.ones(3)})
    for _ in range(3):
        state = attrs.evolve(state, params=tree.map(lambda x: x.requires_grad_(), state.params))
        state, _ = step(state, X)
        assert state.params["w"].grad_fn is None
