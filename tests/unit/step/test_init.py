"""The first state, and its structure without its memory."""

import pytest
import torch
from torch import nn

import fds
from fds import random, tree
from fds.errors import FdsError, StateError
from tests.bits import assert_same_bits, snapshot
from tests.unit.step.problem import BATCH, make, make_params


def test_parameters_are_copied():
    params = make_params()
    state = make().init(params)
    assert_same_bits(state.params, params)
    params["net"]["w"].zero_()
    assert state.params["net"]["w"].abs().sum() > 0
    assert not any(x.requires_grad for x in tree.leaves(state))


def test_parameters_that_require_gradients_lose_that():
    state = make(loss=lambda p, b: (b["x"] @ p["w"]).mean()).init({"w": nn.Parameter(torch.ones(3))})
    assert type(state.params["w"]) is torch.Tensor
    assert not state.params["w"].requires_grad


def test_a_seed_is_its_key():
    assert_same_bits(make().init(make_params(), key=5), make().init(make_params(), key=random.key(5)))
    assert_same_bits(make().init(make_params()).key, random.key(0))


def test_the_key_is_copied():
    key = random.key(5)
    state = make().init(make_params(), key=key)
    key.zero_()
    assert_same_bits(state.key, random.key(5))


@pytest.mark.parametrize("key", [1.0, True, "a", torch.zeros(3, dtype=torch.int64)])
def test_other_keys_are_refused(key):
    with pytest.raises(FdsError):
        make().init(make_params(), key=key)


def test_a_recipe_is_run_with_the_key_and_leaves_the_generator():
    recipe = fds.recipe(lambda: nn.Linear(3, 2))
    before = torch.get_rng_state()
    a, b, c = (make().init(recipe, key=k) for k in (0, 0, 1))
    assert_same_bits(a, b)
    assert not torch.equal(a.params["weight"], c.params["weight"])
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_become_contiguous():
    w = torch.randn(3, 2).t()
    state = make().init({"w": w, "e": torch.ones(1).expand(3)})
    assert all(x.is_contiguous() for x in tree.leaves(state))
    assert_same_bits(state.params["w"], w)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_parameter_that_is_not_finite_is_named(value):
    params = make_params()
    params["net"]["b"][1] = value
    with pytest.raises(StateError, match="finite") as caught:
        make().init(params)
    assert caught.value.where == "net.b"
    assert "1 of 2" in caught.value.got


@pytest.mark.parametrize(
    "view",
    [lambda w: w, lambda w: w.detach(), lambda w: w.t(), lambda w: w.view(-1), lambda w: w[1:]],
    ids=["itself", "detached", "transposed", "flat", "overlapping"],
)
def test_shared_memory_is_refused_by_both_names(view):
    w = torch.randn(3, 3)
    with pytest.raises(StateError, match="share") as caught:
        make().init({"first": w, "second": view(w)})
    assert caught.value.where == "second"
    assert "first" in caught.value.got


def test_parts_of_one_buffer_are_not_shared_memory():
    flat = torch.randn(6)
    make().init({"a": flat[:3], "b": flat[3:], "empty": flat[:0], "none": flat[:0]})


@pytest.mark.parametrize("leaf", [1.0, "text", None, [1, 2.0]])
def test_a_leaf_that_is_no_tensor_is_named(leaf):
    with pytest.raises(StateError, match="not a tensor") as caught:
        make().init({"w": torch.ones(2), "bad": leaf})
    assert caught.value.where.startswith("bad")


def test_complex_parameters_are_refused():
    with pytest.raises(StateError, match="complex") as caught:
        make().init({"z": torch.zeros(2, dtype=torch.complex64)})
    assert caught.value.where == "z"


@pytest.mark.parametrize("empty", [{}, [], (), {"a": {}}])
def test_a_tree_without_parameters_is_refused(empty):
    with pytest.raises(StateError, match="no parameters"):
        make().init(empty)


def test_a_module_is_refused_with_the_way_out():
    with pytest.raises(StateError) as caught:
        make().init(nn.Linear(3, 2))
    assert "functional" in caught.value.hint


def test_two_parameters_of_one_name_are_refused():
    with pytest.raises(StateError, match="key path"):
        make().init({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})


@pytest.mark.parametrize("pattern", ["net.W", "nte.*"])
def test_a_pattern_that_freezes_nothing_is_refused(pattern):
    with pytest.raises(StateError, match="freeze"):
        make(fds.freeze(pattern)).init(make_params())


@pytest.mark.parametrize("params", [torch.ones(3), [torch.ones(3)], (torch.ones(3), torch.zeros(0))])
def test_any_tree_of_tensors_serves(params):
    step = make(loss=lambda p, batch: (batch["x"] @ tree.leaves(p)[0]).square().mean())
    state, _ = step(step.init(params), BATCH)
    assert tree.structure(state.params) == tree.structure(params)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_parameters_keep_their_dtype(dtype):
    step = make(loss=lambda p, batch: (batch["x"].to(dtype) @ p["w"]).square().mean())
    state, _ = step(step.init({"w": torch.ones(3, dtype=dtype)}), BATCH)
    assert {x.dtype for x in tree.leaves((state.params, state.opt))} == {dtype}


# --- structure ---


def layers():
    return fds.Layers([fds.LayerSpec(nn.Linear, 3, 4), nn.BatchNorm1d(4), fds.LayerSpec(nn.Linear, 4, 2)], nn.MSELoss())


def described(state):
    return {path: (tuple(x.shape), x.dtype) for path, x in tree.paths(state).items()}


@pytest.mark.parametrize(
    "params",
    [make_params, lambda: tree.map(lambda x: x.to("meta"), make_params()), lambda: fds.recipe(lambda: nn.Linear(3, 2))],
    ids=["tensors", "meta", "recipe"],
)
def test_the_structure_is_that_of_init(params):
    step, given = make(fds.ema(0.9), fds.loss_scale()), params()
    traced = step.structure(given)
    real = step.init(make_params() if isinstance(given, dict) else given)
    assert described(traced) == described(real)
    assert {x.device.type for x in tree.leaves(traced)} == {"meta"}


def test_the_structure_of_layers_is_that_of_init():
    loss = layers()
    step = make(fds.ema(0.9), fds.freeze("0.*"), loss=loss)
    assert described(step.structure(loss.init)) == described(step.init(loss.init))


def test_tracing_draws_nothing():
    before = torch.get_rng_state()
    make().structure(fds.recipe(lambda: nn.Linear(3, 2)))
    make(loss=(loss := layers())).structure(loss.init)
    assert torch.equal(torch.get_rng_state(), before)


HUGE = 2**25  # four petabytes in float32


def test_tracing_a_recipe_allocates_nothing():
    traced = make().structure(fds.recipe(lambda: nn.Linear(HUGE, HUGE)))
    assert traced.opt["exp_avg"]["weight"].shape == (HUGE, HUGE)


def test_tracing_layers_allocates_nothing():
    loss = fds.Layers([fds.LayerSpec(nn.Linear, HUGE, HUGE)], nn.MSELoss())
    assert make(loss=loss).structure(loss.init).params["0.weight"].shape == (HUGE, HUGE)


def test_tracing_tensors_leaves_them():
    params = make_params()
    before = snapshot(params)
    make().structure(params)
    assert_same_bits(params, before)
