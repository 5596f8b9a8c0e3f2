"""Weights of a `Mean`: their unit is invisible, copies of a microbatch count as one, and weight 0 changes nothing."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import fds
from fds import tree
from tests.bits import assert_same_bits, snapshot
from tests.laws.problems import compositions, make, means, optimizers, problems
from tests.laws.test_law_4_sharding import SIZES, STAGES, batch_of, shard, share
from tests.laws.test_law_5_pipelines import GRIDS, cases, train_grid

FEW = settings(max_examples=settings().max_examples // 3)  # of several trainings each
LOW = compositions(without=("accumulate", "precision", "half", "autocast")).map(lambda names: ["half", *names])


def in_units(problem, power: int):
    """Return the problem with total and weight multiplied by a power of two: as if tokens were counted otherwise."""
    unit = 2.0**power
    wide = lambda x: x.float() if x.dtype is torch.float16 else x  # a total that is added in float16 has no room
    return means(problem, lambda mean: fds.Mean(wide(mean.total) * unit, mean.weight * unit))


def run(step, problem, ranks: int):
    state = step.init(problem.params, key=5)
    for rows in (6, 12):
        index = fds.mesh(dp=-1)["dp"].index
        state, metrics = step(state, share(batch_of(problem, ranks * rows), index, ranks))
    return step.params(state), state, {k: x for k, x in metrics.items() if k != "skipped"}


@FEW
@given(problems(), optimizers(), st.one_of(compositions(), LOW), st.integers(-8, 24), st.integers(1, 2), STAGES, SIZES)
def test_the_unit_of_weights_is_invisible(problem, optimizer, names, power, ranks, stage, size):
    """Bit for bit, float16 too: what overflows or vanishes for tokens does so for millions of them."""

    def with_unit(one):
        return lambda: run(make(names, optimizer, one, shard(stage, size)), one, ranks)

    want = fds.simulate(with_unit(in_units(problem, 0)), ranks)
    assert_same_bits(fds.simulate(with_unit(in_units(problem, power)), ranks), want)


@FEW
@given(cases(2, torch.float32, microbatches=(1, 2, 3)), GRIDS, STAGES, SIZES, LOW, st.integers(-8, 24))
def test_the_unit_of_weights_is_invisible_in_pipelines(case, shape, stage, size, names, power):
    problem, drawn, partition = case
    batch = batch_of(problem, 2 * drawn.plan.num_microbatches * shape[0] * shape[1])

    def of(unit):
        one = in_units(problem, unit), drawn, partition
        return [got for got, *_ in train_grid(one, shape, stage, size, names, lambda: fds.sgd(0.1), [batch] * 2)]

    assert_same_bits(of(power), of(0))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_copies_of_a_microbatch_overflow_as_it_does(stage):
    """However many microbatches and ranks: what is added in 16 bits is divided already."""

    def scales(n, ranks):
        def run():
            step = fds.compose(
                fds.precision(torch.float16, accumulate=torch.float16),
                fds.loss_scale(2.0**18, hysteresis=1),
                fds.accumulate(n),
                shard(stage, 64),
                fds.sgd(1e-9),
            )(lambda p, x: (p["w"] * x).sum(1).float().mean())
            state, seen = step.init({"w": torch.ones(3)}), []
            for _ in range(5):
                state, metrics = step(state, torch.tensor([[1.5, 0.5, 0.25]] * n))
                seen.append((float(metrics["loss_scale"]), bool(metrics["skipped"]), float(metrics["grad_norm"])))
            return seen

        return fds.simulate(run, ranks)[0]

    want = scales(1, 1)
    assert [skipped for _, skipped, _ in want] == [True, True, True, False, False]
    for n, ranks in ((1, 2), (2, 1), (3, 2), (4, 3), (5, 1), (7, 1), (8, 2)):
        got = scales(n, ranks)
        assert [one[:2] for one in got] == [one[:2] for one in want], (n, ranks)
        assert got[-1][2] == pytest.approx(want[-1][2], rel=2 * n * ranks * torch.finfo(torch.float16).eps)


def test_a_batch_that_weighs_nothing_is_no_step_without_overflow():
    step = fds.compose(fds.loss_scale(4.0, window=2), fds.sgd(0.1))(lambda p, x: fds.Mean((p["w"] * x).sum(), x.sum()))
    state = step.init({"w": torch.ones(2)})
    seen = []
    for x in (1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0):
        state, metrics = step(state, torch.full((2,), x))
        seen.append((float(metrics["loss_scale"]), bool(metrics["skipped"])))
    assert [skipped for _, skipped in seen] == [False, *[True] * 3, *[False] * 4]
    plain = step.init({"w": torch.ones(2)})
    want = []
    for _ in range(5):
        plain, metrics = step(plain, torch.ones(2))
        want.append(float(metrics["loss_scale"]))
    assert [scale for scale, skipped in seen if not skipped] == want and want[-1] > want[0]


@FEW
@given(problems(), optimizers(), compositions(), st.integers(1, 2), STAGES, SIZES, st.booleans())
def test_a_batch_that_weighs_nothing_changes_nothing_but_calls(problem, optimizer, names, ranks, stage, size, donated):
    nothing = means(problem, lambda mean: fds.Mean(mean.total, mean.weight * 0))
    more = [fds.donate()] if donated else []

    def of_rank():
        sharding, index = shard(stage, size), fds.mesh(dp=-1)["dp"].index
        mine = share(batch_of(problem, ranks * 6), index, ranks)
        step, empty = (make(names, optimizer, one, sharding, *more) for one in (problem, nothing))
        state, _ = step(step.init(problem.params), mine)
        before = snapshot(state)
        after, metrics = empty(state, mine)
        return before, after, metrics

    for before, after, metrics in fds.simulate(of_rank, ranks):
        assert bool(metrics["skipped"]) and all(x.isfinite() for x in metrics.values())
        assert int(after.calls) == int(before.calls) + 1
        assert_same_bits({**tree.paths(after), "calls": before.calls}, tree.paths(before))
