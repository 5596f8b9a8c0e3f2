"""1-bit LAMB: the algorithm of the paper written plainly; what it shares with 1-bit Adam is tested there."""

import itertools

import numpy as np
import pytest
import torch

import fds
from fds.errors import ComposeError, OptimizerError
from tests.bits import assert_same_bits, snapshot
from tests.optim.test_onebit_adam import SHAPES, composed, drawn, mean_by_signs, trained

ARGUMENTS = {"lr": 0.02, "freeze_step": 8, "betas": (0.8, 0.95), "weight_decay": 0.1, "coeff_beta": 0.7}
BOUNDS = {"min_coeff": 0.02, "max_coeff": 3.0, "factor_min": 0.6, "factor_max": 1.2, "factor_threshold": 0.07}
DEFAULTS = {"min_coeff": 0.01, "max_coeff": 10.0, "factor_min": 0.5, "factor_max": 4.0, "factor_threshold": 0.1}


def norm(x):
    return np.sqrt(np.square(x).sum())


def by_hand(params, gradients, *, lr, freeze_step, betas, weight_decay, coeff_beta, **bounds):
    """Return the parameters after an update for each entry of `gradients`, (W, ...) by name, and all factors."""
    ranks, (b1, b2) = len(gradients[0]["w"]), betas
    p = {name: x.numpy().copy() for name, x in params.items()}
    m, v, w = ({name: np.zeros_like(x) for name, x in p.items()} for _ in range(3))
    mean, last = dict.fromkeys(p, 0.0), dict.fromkeys(p, 1.0)
    errors = {name: (np.zeros((ranks, x.size), np.float32), np.zeros(x.size, np.float32)) for name, x in p.items()}
    factors = {name: [1.0] for name in p}
    for t, by_name in enumerate(gradients):
        for name, g in ((name, g.numpy()) for name, g in by_name.items()):
            if t < freeze_step:
                m[name] = b1 * m[name] + (1 - b1) * g.mean(0)
                w[name] = v[name] = b2 * v[name] + (1 - b2) * g.mean(0) ** 2
                u = m[name] / (np.sqrt(v[name]) + 1e-8) + weight_decay * p[name]
                rate = min(max(norm(p[name]) / norm(u), bounds["min_coeff"]), bounds["max_coeff"])
                mean[name] = coeff_beta * mean[name] + (1 - coeff_beta) * rate
            else:
                given, before = (b1 * m[name][None] + (1 - b1) * g).reshape(ranks, -1), m[name]
                m[name] = mean_by_signs(given.astype(np.float32), *errors[name]).reshape(p[name].shape)
                w[name] = b2 * w[name] + (1 - b2) * ((m[name] - b1 * before) / (1 - b1)) ** 2
                root, fresh = np.sqrt(v[name]) + 1e-8, np.sqrt(w[name]) + 1e-8
                u = m[name] / root + weight_decay * p[name]
                share = min(1, norm(m[name] / root) / norm(u))
                factor = min(max((root / fresh).max() * share + 1 - share, bounds["factor_min"]), bounds["factor_max"])
                near = bounds["factor_threshold"] * last[name]
                last[name] = min(max(factor, last[name] - near), last[name] + near)
                factors[name].append(float(last[name]))
                rate = mean[name] * last[name]
            p[name] = (p[name] - lr * rate * u).astype(np.float32)
    return {name: torch.from_numpy(x) for name, x in p.items()}, factors


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_is_the_algorithm_of_the_paper_and_all_ranks_agree(ranks):
    params, gradients = drawn(40, ranks)
    for t, by_name in enumerate(gradients):  # smaller after warm-up, then larger
        for g in by_name.values():
            g *= 1.0 if t < 8 else 0.2 if t < 24 else 2.0
    want, factors = by_hand(params, gradients, **ARGUMENTS, **BOUNDS)
    assert {0.6, 1.2} <= {one for some in factors.values() for one in some}
    assert {0.93, 1.07} <= {round(b / a, 6) for some in factors.values() for a, b in itertools.pairwise(some)}
    (first, _), *_ = found = trained(fds.onebit_lamb(**ARGUMENTS, **BOUNDS), params, gradients)
    for got, state in found:
        assert_same_bits(got, first)
        assert_same_bits(state.opt, found[0][1].opt)
    for name, x in want.items():
        torch.testing.assert_close(first[name], x, rtol=0, atol=40 * 2**-23)  # a rounding of 1 an update


def test_what_is_known_of_a_parameter_is_one_number_each_and_goes_on_where_it_was(tmp_path):
    params, gradients = drawn(14, 2)
    optimizer = fds.onebit_lamb(**ARGUMENTS, **BOUNDS)
    want = trained(optimizer, params, gradients)
    for calls in (3, 11):  # in warm-up, and after it

        def run(calls=calls):
            step, rank = composed(optimizer)
            state = step.init(params)
            for t, by_name in enumerate(gradients):
                if t == calls:
                    fds.save(tmp_path, state, step)
                    state, _ = fds.load(tmp_path, step, params)
                state, _ = step(state, {name: g[rank][None] for name, g in by_name.items()})
            return state

        for state, (_, one) in zip(fds.simulate(run, 2), want, strict=True):
            assert_same_bits((state.params, state.opt, state.slots), (one.params, one.opt, one.slots))
    for slot in ("lamb_coeff_freeze", "last_factor"):
        assert {name: (x.shape.numel(), x.dtype) for name, x in want[0][1].opt[slot].items()} == dict.fromkeys(
            SHAPES, (1, torch.float64)
        )


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_other_ranks_what_a_parameter_knows_is_the_same(ranks, tmp_path):
    params, gradients = drawn(12, 2)

    def save():
        step, rank = composed(fds.onebit_lamb(**ARGUMENTS))
        state = step.init(params)
        for by_name in gradients:
            state, _ = step(state, {name: g[rank][None] for name, g in by_name.items()})
        fds.save(tmp_path, state, step)
        return state

    before = fds.simulate(save, 2)[0]

    def load():
        step, _ = composed(fds.onebit_lamb(**ARGUMENTS))
        return fds.load(tmp_path, step, params)[0]

    for state in fds.simulate(load, ranks):
        assert_same_bits((state.params, state.opt), (before.params, before.opt))


@pytest.mark.parametrize("calls", [3, 12], ids=["in warm-up", "after it"])
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all_and_keeps_every_bit(calls):
    params, gradients = drawn(calls, 2)

    def run():
        step, rank = composed(fds.onebit_lamb(**ARGUMENTS), fds.skip_nonfinite())
        state = step.init(params)
        for by_name in gradients:
            state, _ = step(state, {name: g[rank][None] for name, g in by_name.items()})
        before = snapshot((state.params, state.opt, state.slots))
        bad = torch.nan if rank == 1 else 1.0
        after, metrics = step(state, {name: g[rank][None] * bad for name, g in gradients[0].items()})
        assert_same_bits((after.params, after.opt, after.slots), before)
        return bool(metrics["skipped"])

    assert fds.simulate(run, 2) == [True, True]


def test_skipped_calls_count_as_warm_up_and_leave_the_variance_that_goes_on_alone():
    params, gradients = drawn(12, 2)
    skipped = (0, 7, 8)  # the last of warm-up and the first after it too

    def run():
        step, rank = composed(fds.onebit_lamb(**ARGUMENTS), fds.skip_nonfinite())
        state = step.init(params)
        for t, by_name in enumerate(gradients):
            bad = torch.inf if t in skipped else 1.0
            state, _ = step(state, {name: g[rank][None] * bad for name, g in by_name.items()})
        return step.params(state)

    got, other = fds.simulate(run, 2)
    assert_same_bits(got, other)
    seen = [by_name for t, by_name in enumerate(gradients) if t not in skipped]
    want, _ = by_hand(params, seen, **{**ARGUMENTS, "freeze_step": 6}, **DEFAULTS)
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=12 * 2**-23)


def test_a_parameter_that_stayed_zero_in_warm_up_has_the_ratio_1():
    params, gradients = drawn(10, 2)
    params["b"].zero_()
    rate = lambda t: 0.02 * (t >= 8)
    (got, state), _ = trained(fds.onebit_lamb(**{**ARGUMENTS, "lr": rate}), params, gradients)
    assert float(state.opt["lamb_coeff_freeze"]["b"]) == 0 and float(state.opt["lamb_coeff_freeze"]["w"]) > 0
    assert got["b"].abs().min() > 0 and got["b"].abs().max() < 1


def test_low_precision_parameters_send_their_momentum_in_float32():
    params, gradients = drawn(12, 2)
    low = {name: x.bfloat16() for name, x in params.items()}
    (got, state), (other, _) = trained(fds.onebit_lamb(**ARGUMENTS), low, gradients)
    assert_same_bits(got, other)
    assert {x.dtype for x in state.opt["exp_avg"].values()} == {torch.bfloat16}
    (want, _), _ = trained(fds.onebit_lamb(**ARGUMENTS), params, gradients)
    for name, x in want.items():
        assert (got[name] - x).norm() < 0.02 * x.norm()


def test_masters_in_float32_move_as_they_do_without_a_cast_of_what_the_loss_sees():
    params, gradients = drawn(12, 2)
    (got, state), (other, _) = trained(fds.onebit_lamb(**ARGUMENTS), params, gradients, fds.precision())
    assert_same_bits(got, other)
    assert {x.dtype for x in state.opt["exp_avg"].values()} == {torch.float32}
    (want, _), _ = trained(fds.onebit_lamb(**ARGUMENTS), params, gradients)
    for name, x in want.items():
        assert (got[name] - x).norm() < 0.02 * x.norm()


def test_a_mask_keeps_the_momentum_of_rows_that_have_no_gradient_at_zero():
    params, gradients = drawn(14, 2)
    for by_name in gradients:
        by_name["w"][:, 5:] = 0
    mask = {"w*": (torch.arange(13) < 5).float()[:, None]}
    (_, state), _ = trained(fds.onebit_lamb(**ARGUMENTS, exp_avg_mask=mask), params, gradients)
    assert not state.opt["exp_avg"]["w"][5:].any() and state.opt["exp_avg"]["w"][:5].all()


def test_groups_send_by_themselves_as_all_together_do():
    params, gradients = drawn(12, 3)
    one = fds.onebit_lamb(**ARGUMENTS)
    (want, _), *_ = trained(one, params, gradients)
    adam = fds.onebit_adam(0.01, freeze_step=8)
    (got, _), *_ = trained(fds.by_name({"[bo]*": adam, "w": fds.onebit_lamb(**ARGUMENTS), "*": one}), params, gradients)
    for name in "wv":
        assert torch.equal(got[name], want[name])


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"lr": -1.0}, "lr"),
        ({"eps": -1e-8}, "eps"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]"),
        ({"weight_decay": "0.1"}, "weight_decay"),
        ({"freeze_step": 0}, "freeze_step"),
        ({"coeff_beta": 1.0}, "coeff_beta"),
        ({"factor_threshold": -0.1}, "factor_threshold"),
        ({"factor_max": lambda t: 4.0}, "factor_max"),
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff is larger than max_coeff"),
        ({"factor_min": 5.0}, "factor_min is larger than factor_max"),
        ({"exp_avg_mask": {"w": 1.0}}, "exp_avg_mask"),
    ],
)
def test_bad_arguments_are_refused(arguments, where):
    with pytest.raises(OptimizerError, match=where):
        fds.onebit_lamb(**arguments)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_slices_are_refused_with_what_to_write_instead(stage):
    def run():
        shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)
        with pytest.raises(ComposeError, match=r"gradients=fds\.transports\.onebit\(\)"):
            fds.compose(shard, fds.onebit_lamb())(lambda p, batch: p["w"].sum())
        return True

    assert fds.simulate(run, 2) == [True, True]
