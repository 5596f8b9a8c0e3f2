"""A small GPT on gloo processes: the plain step, simulated ranks and every stage are one training."""

import functools

import attrs
import pytest
import torch

import fds
from fds import tree
from tests import ranks
from tests.bits import assert_same_bits, snapshot
from tests.sharding.models import data_axis, gpt, largest_difference, mine, tokens, train

STEPS, EPS, LR = 6, 1e-2, 1e-3


def transforms(clip: bool = True):
    decay, none = (fds.adamw(LR, eps=EPS, weight_decay=w) for w in (0.1, 0.0))
    clips = [fds.clip_by_global_norm(0.5)] if clip else []
    scale = fds.loss_scale(2.0**10, window=4)
    return [*clips, fds.ema(0.9), scale, fds.by_name({"*norm*": none, "*.bias": none, "*": decay})]


def stages(world_size: int, dtype: torch.dtype, clip: bool, steps: int, low: bool = False):
    """Train at every stage; return parameters, their averages, the last metrics and what else is equal on all ranks."""
    loss, params = gpt(dtype)
    found = []
    for stage in range(4):
        batches = [tokens(4 * world_size + world_size * (i % 2) * 2) for i in range(steps)]
        extra = [fds.precision(torch.bfloat16, reduce=torch.bfloat16), fds.accumulate(2)] if low else []
        whole, told, state, step = train(
            loss, params, batches, *transforms(clip), *extra, stage=stage, bucket_bytes=1 << 14
        )
        average = step.params(attrs.evolve(state, params=state.slots["ema"]))
        found.append((whole, average, told[-1], state.slots["loss_scale"], state.step, state.calls))
    return found


def test_every_stage_is_the_plain_step_of_all_rows_to_rounding():
    """AdamW divides by sqrt(v) + eps, so a gradient's rounding d moves a parameter by at most lr d / eps a step.

    A gradient element is a sum of at most 2**15 products of size 1 here (rows x positions x width x layers), of which
    eps(float64) each is lost; what parameters have drifted comes back in gradients, times a curvature below 10 after
    clipping, so the drift grows at most by 1 + 10 lr / eps = 2 a step.
    """
    loss, params = gpt(torch.float64)
    plain = fds.compose(fds.accumulate(2), *transforms())(loss)
    state = plain.init(params, key=3)
    for i in range(STEPS):
        state, metrics = plain(state, tokens(8 + 4 * (i % 2)))
    bound = torch.finfo(torch.float64).eps * 2**15 * LR / EPS * sum(2.0**i for i in range(STEPS))
    assert largest_difference(params, state.params) > 1e4 * bound  # so that the bound says something

    job = 2, torch.float64, True, STEPS
    found = ranks.run(stages, *job)
    for rank in found:
        for whole, average, told, scale, *_ in rank:
            assert largest_difference(whole, state.params) <= bound
            assert largest_difference(average, state.slots["ema"]) <= bound
            assert abs(float(told["loss"] - metrics["loss"])) <= bound
            assert abs(float(told["grad_norm"] - metrics["grad_norm"])) <= 100 * bound
            assert_same_bits(scale, state.slots["loss_scale"])
    assert_same_bits(fds.simulate(functools.partial(stages, *job), 2), found)
    for rank in found:
        for other in rank[2:]:
            assert_same_bits(other, rank[1])  # slices of one layout: even the norm is summed in one order


def test_all_stages_are_equal_bit_for_bit_without_a_norm():
    (first, *others), second = ranks.run(stages, 2, torch.float32, False, 3)
    for other in [*others, *second]:
        assert_same_bits(other[0], first[0])


def test_three_ranks_in_16_bit_are_three_simulated_ones():
    job = 3, torch.float32, True, 2, True
    found = ranks.run(stages, *job, world_size=3)
    assert_same_bits(fds.simulate(functools.partial(stages, *job), 3), found)
    for other in found[1:]:
        assert_same_bits(other, found[0])


def poisoned(stage: int):
    """Step once, once with a NaN on rank 1 alone, once more; return what is equal on all ranks, and what was kept."""
    loss, params = gpt(dropout=0.0)
    axis = data_axis()
    bad = lambda p, batch: loss(p, batch["tokens"]) * batch["factor"].mean()
    sharding = fds.shard_optimizer(axis, stage=stage, bucket_bytes=1 << 14)
    step = fds.compose(
        sharding, fds.clip_by_global_norm(1.0), fds.ema(0.9), fds.loss_scale(2.0**8, hysteresis=1), fds.adamw(LR)
    )(bad)
    batch = lambda factor: {"tokens": mine(tokens(4), axis), "factor": torch.full((2,), factor)}
    before, _ = step(step.init(params), batch(1.0))
    kept = snapshot(before)
    after, metrics = step(before, batch(float("nan") if axis.index == 1 else 1.0))
    part = lambda s: (s.params, s.opt, s.buffers, s.step, s.slots["ema"])
    assert_same_bits(part(after), part(kept))
    assert_same_bits(before, kept)
    again, good = step(after, batch(1.0))
    assert bool(metrics["skipped"]) and not bool(good["skipped"])
    assert not metrics["grad_norm"].isfinite() and int(after.calls) == 2 and int(after.step) == 1
    assert float(after.slots["loss_scale"].scale) == 2.0**7 == float(again.slots["loss_scale"].scale)
    return metrics, step.params(again), good


@pytest.mark.parametrize("stage", range(4))
def test_one_nan_on_one_rank_makes_all_skip(stage):
    one, other = ranks.run(poisoned, stage)
    assert_same_bits(one, other)
    assert all(x.isfinite().all() for x in tree.leaves(one[1]))


def one_raises(stage: int):
    loss, params = gpt(dropout=0.0)
    axis = data_axis()

    def bad(p, batch):
        if axis.index == 1:
            raise ZeroDivisionError("mine alone")
        return loss(p, batch)

    step = fds.compose(fds.shard_optimizer(axis, stage=stage, bucket_bytes=1 << 14), fds.adamw(LR))(bad)
    state = step.init(params)
    try:
        step(state, tokens(2))
    except BaseException as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_that_raises_on_one_rank_ends_the_others_with_an_error(stage):
    waiting, raising = ranks.run(one_raises, stage, timeout=8.0)
    assert raising == ("ZeroDivisionError", "mine alone")
    assert waiting[0] == "RankError" and "rank 1" in waiting[1], waiting


def describes_first(stage: int):
    loss, params = gpt(dropout=0.0)
    axis = data_axis()
    step = fds.compose(fds.shard_optimizer(axis, stage=stage, bucket_bytes=1 << 14), fds.adamw(LR))(loss)
    state = step.init(params)
    unused = step.describe(state, mine(tokens(4), axis)).unused
    for _ in range(3):
        state, _ = step(state, mine(tokens(4), axis))
    return step.params(state), unused


@pytest.mark.parametrize("stage", range(4))
def test_describing_a_batch_leaves_nothing_under_way(stage):
    found = ranks.run(describes_first, stage, timeout=20.0)
    loss, params = gpt(dropout=0.0)
    want, *_ = fds.simulate(
        lambda: train(loss, params, [tokens(4)] * 3, fds.adamw(LR), stage=stage, bucket_bytes=1 << 14), 2
    )[0]
    for whole, unused in found:
        assert_same_bits(whole, want)
        assert unused == ()
