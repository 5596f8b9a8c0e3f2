"""The state: a tree of tensors, a name for every leaf, and a right that can be given up."""

import copy
import pickle

import attrs
import pytest
import torch

import fds
from fds import tree
from fds.errors import DonatedStateError
from tests.bits import assert_same_bits


def make(*transforms):
    step = fds.compose(*transforms, fds.adam(0.1))(lambda p, batch: ((batch @ p["0.weight"]) ** 2).mean())
    return step, step.init({"0.weight": torch.ones(3, 2)}, key=4)


def test_every_leaf_is_a_tensor_under_the_name_of_its_place():
    _, state = make(fds.ema(0.9))
    assert set(tree.paths(state)) == {
        "step",
        "calls",
        "params.0.weight",
        "opt.exp_avg.0.weight",
        "opt.exp_avg_sq.0.weight",
        "slots.ema.0.weight",
        "key",
    }
    assert all(isinstance(x, torch.Tensor) for x in tree.leaves(state))


def test_counters_start_at_zero():
    _, state = make()
    assert (state.step.item(), state.calls.item()) == (0, 0)
    assert {x.dtype for x in (state.step, state.calls, state.key)} == {torch.int64}
    assert (state.step.shape, state.calls.shape, state.key.shape) == ((), (), (2,))


def test_a_state_is_frozen():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        make()[1].step = torch.tensor(1)


def test_an_evolved_state_is_given_up_together_with_its_source():
    step, state = make(fds.donate())
    kept = attrs.evolve(state, calls=state.calls + 5)
    step(state, torch.ones(2, 3))
    with pytest.raises(DonatedStateError):
        step.evaluate(kept, torch.ones(2, 3))


@pytest.mark.parametrize(
    "duplicate",
    [lambda s: tree.map(torch.clone, s), copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))],
    ids=["map", "deepcopy", "pickle"],
)
def test_a_copied_state_is_independent(duplicate):
    step, state = make(fds.donate())
    other = duplicate(state)
    assert_same_bits(other, state)
    step(state, torch.ones(2, 3))
    assert step.evaluate(other, torch.ones(2, 3))["loss"] == 9.0


def test_a_shallow_copy_is_given_up_together_with_its_source():
    step, state = make(fds.donate())
    kept = copy.copy(state)
    step(state, torch.ones(2, 3))
    with pytest.raises(DonatedStateError):
        step(kept, torch.ones(2, 3))


def test_the_error_says_who_refused_and_when_the_state_was_given_up():
    step, state = make(fds.donate())
    for _ in range(3):
        old, (state, _) = state, step(state, torch.ones(2, 3))
    with pytest.raises(DonatedStateError, match="evaluate") as caught:
        step.evaluate(old, torch.ones(2, 3))
    assert caught.value.where == "call 2"
    assert "torch.clone" in caught.value.hint


def test_a_fresh_state_passes_the_check():
    make()[1].check("save")
