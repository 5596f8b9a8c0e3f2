"""Law 1: accumulate(1) is the identity, accumulate(n) the hand-written loop, and the plain step to rounding."""

import pytest
import torch
from hypothesis import given, strategies as st

import fds
from fds import loss as losses, tree
from tests.bits import assert_rounding, assert_same_bits
from tests.laws.problems import ROWS, compositions, make, optimizers, problems


@given(problems(), optimizers(), compositions(without=("accumulate",)))
def test_accumulating_one_microbatch_is_the_identity(problem, optimizer, names):
    plain, accumulated = make(names, optimizer, problem), make(names, optimizer, problem, fds.accumulate(1))
    a, b = plain.init(problem.params), accumulated.init(problem.params)
    for _ in range(2):
        (a, metrics_a), (b, metrics_b) = plain(a, problem.batch), accumulated(b, problem.batch)
    assert_same_bits((b, metrics_b), (a, metrics_a))


@given(problems(), optimizers(), st.sampled_from([2, 3, 4]))
def test_accumulation_is_the_hand_written_loop(problem, optimizer, n):
    step = make([], optimizer, problem, fds.accumulate(n))
    state = step.init(problem.params, key=3)
    new, metrics = step(state, problem.batch)

    # the loop: microbatches by hand, torch.autograd.grad, a running sum in place, the optimizer on the result
    trained = {k: x for k, x in tree.paths(state.params).items() if x.is_floating_point()}
    total, weight, loss, buffers = [torch.zeros_like(x) for x in trained.values()], 0, 0.0, state.buffers
    leaves, build = tree.flatten(problem.batch)
    size = ROWS // n
    for i, setting in enumerate(step.settings(step.call(state), state.buffers, n)):
        cut = [x.value if not isinstance(x, torch.Tensor) else x[i * size : (i + 1) * size] for x in leaves]
        held = {k: x.clone().requires_grad_() for k, x in trained.items()}
        full = [held.get(k, x) for k, x in tree.paths(state.params).items()]
        outcome = losses.run(problem.loss, tree.flatten(state.params)[1](full), build(cut), buffers, setting)
        buffers, weight, loss = outcome.buffers, weight + outcome.weight, loss + outcome.total.detach()
        for g, d in zip(total, torch.autograd.grad(outcome.total, list(held.values()), allow_unused=True), strict=True):
            if d is not None:
                g.add_(d)
    params = [x.clone().view(-1) for x in trained.values()]
    segments = [[fds.optim.Segment(k, tuple(x.shape), 0, x.numel())] for k, x in trained.items()]
    params, _ = step.optimizer.update(
        [g.view(-1) for g in total],
        step.optimizer.init(segments, params=params),
        params,
        step=state.step,
        lr=step.optimizer.learning_rate(state.step),
        grad_scale=torch.as_tensor(weight, dtype=torch.float32),
        skip=None,
        segments=segments,
        axes=(),
    )
    got = [x.view(-1) for k, x in tree.paths(new.params).items() if k in trained]
    assert_same_bits((got, new.buffers, metrics["loss"]), (params, buffers, loss / weight))


@given(problems(torch.float64, dropout=False, norm=False), st.sampled_from([2, 3, 4, 6]))
def test_accumulation_is_the_plain_step_to_rounding(problem, n):
    plain, accumulated = make([], fds.sgd(1.0), problem), make([], fds.sgd(1.0), problem, fds.accumulate(n))
    state = plain.init(problem.params)
    (want, loss), (got, metrics) = plain(state, problem.batch), accumulated(state, problem.batch)
    scale = max(1.0, *(float(x.abs().max()) for x in tree.leaves(want.params)))
    assert_rounding(got.params, want.params, additions=problem.additions, scale=scale)
    assert_rounding(metrics["loss"], loss["loss"], additions=problem.additions, scale=scale)


@given(problems())
def test_microbatches_are_views(problem):
    step = make([], fds.sgd(0.1), problem, fds.accumulate(3))
    held = {x.untyped_storage().data_ptr() for x in tree.leaves(problem.batch) if isinstance(x, torch.Tensor)}
    for microbatch in step.split_batch(step.call(step.init(problem.params)), problem.batch).microbatches:
        for x in tree.leaves(microbatch):
            assert x.dim() < 2 or x.untyped_storage().data_ptr() in held


def test_a_second_accumulation_is_refused_with_the_product():
    with pytest.raises(fds.errors.ComposeError) as caught:
        fds.compose(fds.accumulate(4), fds.sgd(0.1), fds.accumulate(3))(lambda p, b: p.sum())
    assert "accumulate(12)" in caught.value.hint and "accumulate(12)" in caught.value.want
