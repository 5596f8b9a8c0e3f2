"""Law 9, one process: `load(save(state))` is the identity, and training goes on as if it had never stopped."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import fds
from fds import tree
from fds.errors import StorageError
from tests.bits import assert_same_bits
from tests.laws.problems import compositions, make, optimizers, problems


def run(step, state, batch, n):
    told = []
    for _ in range(n):
        state, metrics = step(state, batch)
        told.append(tree.map(torch.clone, metrics))
    return state, told


@given(problems(), optimizers(), compositions(), st.integers(0, 3), st.booleans(), st.booleans())
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path_factory, problem, optimizer, names, n, donated, on_meta):
    dir = tmp_path_factory.mktemp("run")
    more = [fds.donate()] if donated else []
    step = make(names, optimizer, problem, *more)
    state, _ = run(step, step.init(problem.params, key=7), problem.batch, n)
    fds.save(dir, state, step, extra={"position": n})

    fresh = make(names, optimizer, problem, *more)
    params = tree.map(lambda x: x.to("meta"), problem.params) if on_meta else problem.params
    loaded, extra = fds.load(dir, fresh, params)
    assert extra == {"position": n}
    assert tree.structure(loaded) == tree.structure(state)
    assert_same_bits(loaded, state)

    straight, told = run(step, state, problem.batch, 3)
    resumed, retold = run(fresh, loaded, problem.batch, 3)
    assert_same_bits(resumed, straight)
    assert_same_bits(retold, told)


def everything(loss):
    return fds.compose(
        fds.donate(),
        fds.accumulate(2),
        fds.loss_scale(2.0**10, window=2),
        fds.clip_by_global_norm(1.0),
        fds.adamw(0.01),
        fds.ema(0.9),
        fds.checkpoint_activations(),
    )(loss)


def layers(width=6):
    first, last = fds.LayerSpec(nn.Linear, 5, width), fds.LayerSpec(nn.Linear, width, 3)
    return fds.Layers([first, nn.BatchNorm1d(width), torch.tanh, nn.Dropout(0.3), last], nn.MSELoss())


BATCH = (torch.arange(40.0).view(8, 5).sin(), torch.arange(24.0).view(8, 3).cos())


def test_a_recipe_says_what_to_load_and_nothing_is_drawn(tmp_path):
    step = everything(layers())
    state, _ = run(step, step.init(step.loss.init, key=3), BATCH, 5)
    fds.save(tmp_path, state, step)
    again = everything(layers())
    generator = torch.get_rng_state()
    loaded, _ = fds.load(tmp_path, again, again.loss.init)
    assert torch.equal(torch.get_rng_state(), generator)
    assert_same_bits(loaded, state)
    assert {x.device.type for x in tree.leaves(loaded)} == {"cpu"}
    assert_same_bits(run(again, loaded, BATCH, 4)[0], run(step, state, BATCH, 4)[0])


def test_a_module_built_on_meta_says_what_to_load(tmp_path):
    def build():
        apply, params, _ = fds.functional(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))
        return everything(lambda params, batch: nn.functional.mse_loss(apply(params, batch[0]), batch[1])), params

    step, params = build()
    state, _ = run(step, step.init(params), BATCH, 2)
    fds.save(tmp_path, state, step)
    with torch.device("meta"):
        again, nothing = build()
    assert all(x.is_meta for x in tree.leaves(nothing))
    loaded, _ = fds.load(tmp_path, again, nothing)
    assert_same_bits(run(again, loaded, BATCH, 2)[0], run(step, state, BATCH, 2)[0])


def test_a_skipped_step_has_a_tag_of_its_own(tmp_path):
    step = everything(layers())
    state = step.init(step.loss.init)
    state, _ = step(state, BATCH)
    first = fds.save(tmp_path, state, step)
    state, metrics = step(state, (BATCH[0] * float("nan"), BATCH[1]))
    assert bool(metrics["skipped"]) and first != fds.save(tmp_path, state, step)
    loaded, _ = fds.load(tmp_path, step, step.loss.init)
    assert (int(loaded.step), int(loaded.calls)) == (1, 2)


def test_a_wider_model_and_a_missing_average_are_named(tmp_path):
    step = everything(layers())
    fds.save(tmp_path, step.init(step.loss.init), step)
    wider = everything(layers(9))
    with pytest.raises(StorageError) as error:
        fds.load(tmp_path, wider, wider.loss.init)
    assert error.value.what == "this is a save of another model: params.0.weight"
    assert "(6, 5)" in error.value.got and "(9, 5)" in error.value.want
    plain = fds.compose(fds.loss_scale(), fds.adamw(0.01))(layers())
    with pytest.raises(StorageError, match=r"another composition: slots\.ema\.0\.weight") as error:
        fds.load(tmp_path, plain, plain.loss.init)
    assert "it was saved by compose(donate(), accumulate(2), loss_scale(1024.0, window=2)" in error.value.hint
