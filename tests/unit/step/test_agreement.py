"""Ranks that composed different steps are told so before they train, and ranks that composed the same never are."""

import functools

import pytest
import torch

import fds
from fds import schedules
from fds.errors import ComposeError
from fds.step.checks.agreement import spelled

PARAMS = {"w": torch.ones(3), "b": torch.zeros(3)}


class Falling:
    """A schedule that is an object."""

    def __init__(self, start):
        self.start = start

    def __call__(self, t):
        return self.start / (t + 2)


def falling(t, start):
    return start / (t + 2)


def captured(start):
    return lambda t: start / (t + 2)


def looked_up(table):
    return lambda t: table.get(0)


@fds.step.transform
def noisy(how):
    return lambda step: fds.step.fill(step)


OTHER = {  # i -> a composition; those of 0 and 1 differ in one thing
    "optimizer": lambda i: (fds.sgd, fds.lion)[i](0.1),
    "rate": lambda i: fds.adamw(0.1 + i),
    "schedule": lambda i: fds.sgd(schedules.warmup_cosine(0.1, warmup_steps=1 + i, total_steps=9)),
    "captured number": lambda i: fds.sgd(captured(0.1 + i)),
    "captured table": lambda i: fds.sgd(looked_up({0: 0.1 + i})),
    "constant": lambda i: fds.sgd((lambda t: 0.1 * t, lambda t: 0.2 * t)[i]),
    "default": lambda i: fds.sgd(lambda t, rate=0.1 + i: rate),
    "argument of a partial": lambda i: fds.sgd(functools.partial(falling, start=0.1 + i)),
    "schedule of a beta": lambda i: fds.adamw(0.1, betas=(0.9, captured(0.1 + i))),
    "object": lambda i: fds.sgd(Falling(0.1 + i)),
    "method": lambda i: fds.sgd(Falling(0.1 + i).__call__),
    "group": lambda i: fds.by_name({"w": fds.sgd(captured(0.1)), "*": fds.sgd(captured(0.1 + i))}),
    "clip": lambda i: fds.compose(fds.clip_by_global_norm(1.0 + i), fds.sgd(0.1)),
    "one transform more": lambda i: fds.compose(*[fds.skip_nonfinite()] * i, fds.sgd(0.1)),
    "frozen": lambda i: fds.compose(fds.freeze("wb"[i]), fds.sgd(0.1)),
    "scale": lambda i: fds.compose(fds.loss_scale(initial=2.0 ** (8 + i)), fds.sgd(0.1)),
    "tensor": lambda i: fds.compose(noisy(torch.ones(3) + i), fds.sgd(0.1)),
    "stage": lambda i: fds.compose(fds.shard_optimizer(fds.mesh(dp=2)["dp"], stage=1 + i), fds.sgd(0.1)),
}


def make(composition, stage=0):
    axis = fds.mesh(dp=-1)["dp"]
    made = composition(axis.index)
    if "shard_optimizer" not in str(made):
        made = fds.compose(fds.shard_optimizer(axis, stage=stage), made)
    return made(lambda p, b: ((p["w"] + p["b"]) * b).sum())


def refused(call):
    with pytest.raises(ComposeError) as error:
        call()
    return error.value


@pytest.mark.parametrize("what", OTHER)
def test_ranks_that_composed_different_steps_are_told_on_every_rank(what):
    errors = fds.simulate(lambda: refused(lambda: make(OTHER[what]).init(PARAMS)), 2)
    assert str(errors[0]) == str(errors[1]) and errors[0].where == "rank 1 of dp"
    assert errors[0].got not in errors[0].want, f"a reader sees no difference: {errors[0]}"


def test_whatever_call_of_a_step_comes_first_compares(tmp_path):
    fds.save(tmp_path, (step := fds.compose(fds.sgd(0.1))(lambda p, b: p["w"].sum())).init(PARAMS), step)

    def body():
        same = make(lambda i: fds.sgd(0.1))
        state, batch = same.init(PARAMS), torch.ones(3)
        other = lambda: make(lambda i: fds.sgd(0.1 + i))
        calls = (
            lambda step: step.init(PARAMS),
            lambda step: fds.load(tmp_path, step, PARAMS),
            lambda step: step(state, batch),
            lambda step: step.evaluate(state, batch),
            lambda step: step.describe(state, batch),
            lambda step: step.params(state),
        )
        return [refused(lambda call=call: call(other())).got for call in calls]

    assert fds.simulate(body, 2) == [["sgd(lr=1.1)"] * 6] * 2


def test_ranks_that_composed_the_same_are_not_refused():
    """What differs between ranks without a meaning: addresses, devices' numbers, axes' coordinates, caches."""

    def body():
        axis, cache = fds.mesh(dp=-1)["dp"], {}
        cache[axis.index] = object()

        class Local(Falling):
            pass

        def cached(t):
            return cache.get(int(t), 0.1) and len(axis.ranks) * 0.1

        memo, calls = {axis.index: 0.1}, axis.index

        def memoized(t):
            nonlocal calls
            calls += 1
            if int(t) not in memo:
                memo[int(t)] = 0.1 / (1 + int(t))
            return memo[int(t)]

        for schedule in (
            cached,
            memoized,
            Local(0.1),
            functools.partial(falling, start=0.2),
            captured(0.3),
            Local(0.1).__call__,
        ):
            make(lambda i, schedule=schedule: fds.adamw(schedule)).init(PARAMS)
        return [spelled(x) for x in (object(), torch.device("cuda", axis.index), axis, {1, 2, 3}, cached, memoized)]

    first, second = fds.simulate(body, 2)
    assert first == second


def test_functions_that_capture_themselves_are_spelled():
    def recursive(n):
        return recursive(n - 1)

    assert spelled(recursive).startswith("tests.unit.step.test_agreement.test_functions")
