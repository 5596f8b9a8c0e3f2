"""Optimizers that users write: what breaks the contract is named, alone and as a member of `by_name`."""

import pytest
import torch

import fds
from fds import tree
from fds.errors import ComposeError, OptimizerError
from tests.bits import assert_same_bits
from tests.unit.step.problem import BATCH, loss_fn, make_params

WAYS = {"alone": lambda one: one, "by_name": lambda one: fds.by_name({"net.b": fds.adam(0.1), "*": one})}


def momentum(segments, *, params):
    return {"m": [torch.zeros_like(p) for p in params]}


def keep(grads, opt, params, **rest):
    return params, opt


def returns(change):
    return lambda grads, opt, params, **rest: change(params, opt)


INIT = {
    "nothing": (lambda params: None, "slot: ["),
    "a list": (lambda params: [torch.zeros_like(p) for p in params], "slot: ["),
    "names that are none": (lambda params: {0: [torch.zeros_like(p) for p in params]}, "slot: ["),
    "a slot that is none": (lambda params: {"m": None}, "lea"),
    "a tensor for a list": (lambda params: {"m": torch.zeros_like(params[0])}, "lea"),
    "too few": (lambda params: {"m": [torch.zeros_like(p) for p in params][1:]}, "lea"),
    "too many": (lambda params: {"m": [torch.zeros_like(p) for p in params] * 2}, "lea"),
    "another shape": (lambda params: {"m": [p.new_zeros(1) for p in params]}, "lea"),
    "numbers": (lambda params: {"m": [0.0 for _ in params]}, "lea"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("init", "want"), INIT.values(), ids=INIT)
def test_an_init_that_makes_something_else_is_named(way, init, want):
    mine = fds.Optimizer(lambda segments, *, params: init(params), keep, text="mine(0.1)")
    with pytest.raises(ComposeError) as caught:
        fds.compose(way(mine))(loss_fn).init(make_params())
    assert "init of mine(0.1)" in caught.value.where and want in caught.value.want and caught.value.got


UPDATE = {
    "nothing": (lambda p, opt: None, "(params, opt)"),
    "no slots": (lambda p, opt: (p, {}), "m"),
    "another slot": (lambda p, opt: (p, {**opt, "n": opt["m"]}), "m"),
    "no parameters": (lambda p, opt: (None, opt), "lea"),
    "parameters of another dtype": (lambda p, opt: ([x.double() for x in p], opt), "float32"),
    "a slot that is none": (lambda p, opt: (p, {"m": None}), "lea"),
    "a slot that lacks one": (lambda p, opt: (p, {"m": opt["m"][1:]}), "lea"),
    "a slot of another shape": (lambda p, opt: (p, {"m": [x[:1] for x in opt["m"]]}), "lea"),
    "a slot of another dtype": (lambda p, opt: (p, {"m": [x.double() for x in opt["m"]]}), "float32"),
    "its argument, with another slot": (lambda p, opt: (p, opt) if opt.update(n=[]) is None else None, "m"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("change", "want"), UPDATE.values(), ids=UPDATE)
def test_an_update_that_returns_something_else_is_named_and_the_state_stays(way, change, want):
    step = fds.compose(way(fds.Optimizer(momentum, returns(change), text="mine(0.1)")))(loss_fn)
    state = step.init(make_params())
    before = tree.map(torch.clone, state)
    with pytest.raises(ComposeError) as caught:
        step(state, BATCH)
    assert "update of mine(0.1)" in caught.value.where and want in caught.value.want and caught.value.got
    assert_same_bits(state, before)


def in_lists(grads, opt, params, *, step, lr, grad_scale, skip, segments, axes):
    """Put new tensors into the lists that it was given."""
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        opt["m"][i] = 0.9 * opt["m"][i] + g
        params[i] = p - lr * opt["m"][i]
    return params, opt


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("parts", [(), (fds.donate(),)], ids=["pure", "donated"])
def test_new_tensors_in_the_lists_that_it_was_given_count(way, parts):
    mine = fds.Optimizer(momentum, in_lists, lr=0.1)
    step, known = (fds.compose(*parts, way(one))(loss_fn) for one in (mine, fds.sgd(0.1, momentum=0.9)))
    got, want = step.init(make_params()), known.init(make_params())
    for _ in range(3):
        (got, _), (want, _) = step(got, BATCH), known(want, BATCH)
    for a, b in zip(tree.leaves(got.params), tree.leaves(want.params), strict=True):
        torch.testing.assert_close(a, b)


def test_functions_that_do_not_take_what_a_step_passes_are_refused_where_they_are_given():
    def update(grads, opt, params, *, step, lr, grad_scale, skip, segments, axes):
        return params, opt

    fds.Optimizer(momentum, update)
    for init, other, missing in [
        (momentum, lambda grads, opt, params, *, step, lr: (params, opt), "grad_scale"),
        (momentum, lambda grads, params, **rest: (params, {}), "positional"),
        (lambda params: {}, update, "params"),
    ]:
        with pytest.raises(OptimizerError) as caught:
            fds.Optimizer(init, other)
        assert missing in caught.value.hint and "segments" in caught.value.want and caught.value.got
    with pytest.raises(OptimizerError) as caught:
        fds.Optimizer(momentum, update, hyper={"decay": 0.9})
    assert "values" in caught.value.hint
    with pytest.raises(OptimizerError, match="not a function"):
        fds.Optimizer(None, update)  # pyright: ignore[reportArgumentType]
