"""Law 3: a scale at a power of two is invisible, and a non-finite batch leaves the state as it was."""

import torch
from hypothesis import given, strategies as st

import fds
from fds import tree
from tests.bits import assert_same_bits, snapshot
from tests.laws.problems import compositions, make, optimizers, problems

SCALES = ("loss_scale", "static_loss_scale", "skip_nonfinite", "half")  # float16 overflows, and goes subnormal


@given(problems(), optimizers(), compositions(without=SCALES), st.integers(-8, 16), st.booleans())
def test_scaling_by_a_power_of_two_is_invisible(problem, optimizer, names, power, static):
    scale = fds.static_loss_scale(2.0**power) if static else fds.loss_scale(2.0 ** abs(power), window=1)
    plain, scaled = make(names, optimizer, problem), make(names, optimizer, problem, scale)
    a, b = plain.init(problem.params), scaled.init(problem.params)
    for _ in range(3):
        (a, metrics_a), (b, metrics_b) = plain(a, problem.batch), scaled(b, problem.batch)
    assert_same_bits((b.params, b.opt, b.buffers, b.step), (a.params, a.opt, a.buffers, a.step))
    assert_same_bits({k: metrics_b[k] for k in metrics_a}, metrics_a)


@given(
    problems(),
    optimizers(),
    compositions(without=SCALES),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.sampled_from([fds.loss_scale, fds.static_loss_scale, fds.skip_nonfinite]),
    st.booleans(),
)
def test_a_batch_that_is_not_finite_leaves_everything_but_calls(problem, optimizer, names, bad, transform, donated):
    more = (transform(), fds.donate()) if donated else (transform(),)
    step = make(names, optimizer, problem, *more)
    state, _ = step(step.init(problem.params), problem.batch)
    floats = {p for p, x in tree.paths(problem.batch).items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    if not floats:
        return
    broken = tree.flatten(problem.batch)[1](
        [
            x.masked_fill(torch.arange(len(x))[:, None] == 7, bad) if p in floats else x
            for p, x in tree.paths(problem.batch).items()
        ]
    )
    before = snapshot(state)
    after, metrics = step(state, broken)
    assert bool(metrics["skipped"]) and int(after.calls) == int(before.calls) + 1
    kept = {**before.slots, "loss_scale": after.slots["loss_scale"]} if "loss_scale" in before.slots else before.slots
    assert_same_bits(
        (after.params, after.opt, after.buffers, after.step, after.key, after.slots),
        (before.params, before.opt, before.buffers, before.step, before.key, kept),
    )
