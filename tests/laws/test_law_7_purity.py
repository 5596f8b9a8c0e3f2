"""Law 7: a step is a pure function: equal results twice, and nothing that it was given has changed."""

import random

import numpy
import torch
from hypothesis import given, strategies as st

import fds
from fds import tree
from tests.bits import assert_same_bits, snapshot
from tests.laws.problems import compositions, make, optimizers, problems


@given(problems(), optimizers(), compositions())
def test_a_step_twice_is_equal_and_touches_nothing(problem, optimizer, names):
    step = make(names, optimizer, problem)
    state = step.init(problem.params)
    before, rows, given_params = snapshot(state), snapshot(problem.batch), snapshot(problem.params)
    generators = (torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state()))
    first, second = step(state, problem.batch), step(state, problem.batch)
    assert_same_bits(second, first)
    assert_same_bits(state, before)
    assert_same_bits(tree.map(_plain, problem.batch), tree.map(_plain, rows))
    assert_same_bits(problem.params, given_params)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), repr(numpy.random.get_state())) == generators[1:]


@given(problems(), optimizers(), compositions(), st.lists(st.booleans(), min_size=5, max_size=5))
def test_states_and_views_that_are_held_never_change(problem, optimizer, names, hold):
    step = make(names, optimizer, problem)
    state, held = step.init(problem.params), []
    for keep in hold:
        state, metrics = step(state, problem.batch)
        if keep:
            views = [x.view(-1)[:2] for x in tree.leaves(state)]
            arrays = [x.numpy() for x in tree.leaves(state.params) if x.device.type == "cpu"]
            held.append((views, snapshot(views), arrays, [a.copy() for a in arrays], metrics, snapshot(metrics)))
    for views, kept, arrays, copied, metrics, told in held:
        assert_same_bits(views, kept)
        assert_same_bits(metrics, told)
        assert all(numpy.array_equal(a, b, equal_nan=True) for a, b in zip(arrays, copied, strict=True))


@given(problems(), optimizers(), compositions())
def test_donating_gives_the_same_numbers(problem, optimizer, names):
    pure, donating = make(names, optimizer, problem), make(names, optimizer, problem, fds.donate())
    a, b = pure.init(problem.params), donating.init(problem.params)
    for _ in range(3):
        (a, metrics_a), (b, metrics_b) = pure(a, problem.batch), donating(b, problem.batch)
        assert_same_bits((b, metrics_b), (a, metrics_a))


@given(problems(), optimizers(), compositions())
def test_evaluating_is_pure_and_has_no_dropout(problem, optimizer, names):
    step = make(names, optimizer, problem)
    state = step.init(problem.params)
    before, generators = snapshot(state), torch.get_rng_state()
    first = step.evaluate(state, problem.batch)
    if problem.name != "raw":  # a functional dropout has no mode
        other = step.evaluate(step.init(problem.params, key=99), problem.batch)
        assert_same_bits(other, first)
    assert_same_bits(step.evaluate(state, problem.batch), first)
    assert_same_bits(state, before)
    assert torch.equal(torch.get_rng_state(), generators)


def _plain(x):
    return x if isinstance(x, torch.Tensor) else x.value
