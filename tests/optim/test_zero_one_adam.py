"""0/1 Adam: the algorithm written plainly with parameters of every rank, and what is agreed, kept and refused."""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import fds
from fds.errors import OptimizerError
from fds.optim.exchange import GrowingIntervals
from tests.bits import assert_same_bits
from tests.optim.test_onebit_adam import SHAPES, drawn, mean_by_signs, trained

STEPS = 200 if os.environ.get("FDS_HYPOTHESIS_PROFILE") == "full" else 40
ARGUMENTS = {"var_freeze_step": 14, "var_update_scaler": 3, "local_step_scaler": 6, "local_step_clipper": 3}
ARGUMENTS |= {"betas": (0.8, 0.95), "weight_decay": 0.1}
KINDS = "DDDDsDsDsssDssAAAAAA.A.A.AA..A..A..A..A."  # dense, in signs, agreeing, alone


def in_turn(phases, calls):
    """Return what each call does, by counters that run: D and s in the first phase, A and . in the second."""
    found, variance, local = "", [1, 0], [1, 0]  # interval, calls at it
    for call in range(1, calls + 1):
        if call <= phases.var_freeze_step:
            dense = call % variance[0] == 0
            found, variance[1] = found + ("D" if dense else "s"), variance[1] + dense
            if variance[1] == phases.var_update_scaler:
                variance = [2 * variance[0], 0]
        else:
            found, local[1] = found + ("A" if call % local[0] == 0 else "."), local[1] + 1
            if local[1] == phases.local_step_scaler:
                local = [min(2 * local[0], phases.local_step_clipper), 0]
    return found


def by_hand(params, gradients, lr, kinds, *, betas, weight_decay):
    """Return the parameters that are agreed on after an update for each entry of `gradients`, (W, ...) by name.

    Every rank has parameters, a momentum and a sum of updates of its own, as in the paper.
    """
    ranks = len(gradients[0]["w"])
    every = lambda x: np.repeat(x[None].reshape(1, -1), ranks, 0).astype(np.float64)
    agreed = {name: x.numpy().reshape(-1).astype(np.float64) for name, x in params.items()}
    p, m = ({name: every(x * k) for name, x in agreed.items()} for k in (1, 0))
    u, v = ({name: np.zeros_like(x) for name, x in some.items()} for some in (p, agreed))
    errors, lrs = {}, 0.0
    for t, (by_name, kind) in enumerate(zip(gradients, kinds, strict=False)):
        lrs += lr(t)
        for name, g in ((name, g.numpy().reshape(ranks, -1).astype(np.float64)) for name, g in by_name.items()):
            if name not in errors or kinds[: t + 1].find("A") == t:  # what is sent is of another kind from here on
                errors[name] = np.zeros((ranks, v[name].size), np.float32), np.zeros(v[name].size, np.float32)
            if kind == "D":
                g = every(g.mean(0))
                v[name] = betas[1] * v[name] + (1 - betas[1]) * g[0] ** 2
            if kind == "s":
                g = every(mean_by_signs(g.astype(np.float32), *errors[name]))
            m[name] = betas[0] * m[name] + (1 - betas[0]) * g
            root = np.sqrt(v[name]) + 1e-8
            step = lr(t) * (m[name] / root + weight_decay * p[name])
            p[name] = p[name] - step
            if kind in "A.":
                u[name] = u[name] - step
            if kind == "A":
                x = mean_by_signs((u[name] * root).astype(np.float32), *errors[name])
                m[name], u[name] = every(-x / lrs), np.zeros_like(u[name])
                p[name] = every(agreed[name] + x / root)
            if kind != ".":
                agreed[name] = p[name][0]
        lrs = lrs if kind == "." else 0.0
    return {name: torch.from_numpy(x.astype(np.float32)).view(params[name].shape) for name, x in agreed.items()}


def falling(t):
    """Return a learning rate that no two calls have in common."""
    return 0.01 / (1 + t / 50)


@given(st.tuples(*(st.integers(1, n) for n in (80, 12, 12, 20))))
def test_calls_do_what_counters_that_run_say(arguments):
    phases = GrowingIntervals(*arguments)
    first = ["s" if phases.local(calls) else "D" for calls in range(phases.var_freeze_step)]
    found = first + ["A" if phases.agrees(calls) else "." for calls in range(phases.var_freeze_step, 150)]
    assert "".join(found) == in_turn(phases, 150)
    assert [calls for calls in range(150) if phases.begins(calls)] == [phases.var_freeze_step]
    assert all(phases.local(calls) for calls in range(phases.var_freeze_step, 150))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_is_the_algorithm_of_the_paper_and_all_ranks_agree(ranks):
    params, gradients = drawn(STEPS, ranks)
    kinds = in_turn(GrowingIntervals(*list(ARGUMENTS.values())[:4]), STEPS)
    assert kinds[:40] == KINDS
    want = by_hand(params, gradients, falling, kinds, betas=(0.8, 0.95), weight_decay=0.1)
    (first, _), *_ = found = trained(fds.zero_one_adam(falling, **ARGUMENTS), params, gradients)
    for got, state in found:
        assert_same_bits(got, first)
        assert_same_bits((state.opt, state.slots["local_lr"]), (found[0][1].opt, found[0][1].slots["local_lr"]))
    for name, x in want.items():
        torch.testing.assert_close(first[name], x, rtol=0, atol=STEPS * 2**-22)


def without_gradients(since):
    """Return parameters, and gradients of 30 calls, which the last rows of `w` do not have since some call."""
    params, gradients = drawn(30, 2)
    for by_name in gradients[since:]:
        by_name["w"][:, 5:] = 0
    return params, gradients


def test_a_mask_keeps_what_arrives_in_signs_at_zero():
    params, gradients = without_gradients(since=1)
    mask = (torch.arange(13) < 5).float()[:, None]
    optimizer = lambda **mask: fds.zero_one_adam(0.01, **ARGUMENTS, **mask)
    (masked, state), _ = trained(optimizer(exp_avg_mask={"w*": mask}), params, gradients)
    assert not state.opt["exp_avg"]["w"][5:].any() and state.opt["exp_avg"]["w"][:5].all()
    (plain, state), _ = trained(optimizer(), params, gradients)
    assert state.opt["exp_avg"]["w"][5:].all()
    for name in SHAPES.keys() - {"w"}:
        assert torch.equal(masked[name], plain[name])


def test_elements_that_never_had_a_gradient_stay_where_they_are():
    params, gradients = without_gradients(since=0)
    (found, _), _ = trained(fds.zero_one_adam(0.01, **{**ARGUMENTS, "weight_decay": 0.0}), params, gradients)
    assert torch.equal(found["w"][5:], params["w"][5:]) and not torch.equal(found["w"][:5], params["w"][:5])


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"lr": -1.0}, "lr"),
        ({"eps": -1e-8}, "eps"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]"),
        ({"weight_decay": "0.1"}, "weight_decay"),
        ({"var_freeze_step": 0}, "var_freeze_step"),
        ({"var_update_scaler": 1.5}, "var_update_scaler"),
        ({"local_step_scaler": True}, "local_step_scaler"),
        ({"local_step_clipper": -1}, "local_step_clipper"),
        ({"exp_avg_mask": [1]}, "exp_avg_mask"),
    ],
)
def test_bad_arguments_are_refused(arguments, where):
    with pytest.raises(OptimizerError, match=where):
        fds.zero_one_adam(**arguments)


def test_masks_that_do_not_fit_are_refused_by_init():
    for mask, where in (({"wight": torch.ones(1)}, "wight"), ({"w": torch.ones(2, 5)}, "exp_avg_mask, w")):
        step = fds.compose(fds.zero_one_adam(exp_avg_mask=mask))(lambda p, batch: p["w"].sum())
        with pytest.raises(OptimizerError, match=where):
            step.init(drawn(0, 1)[0])


@pytest.mark.parametrize("other", [fds.onebit_adam(freeze_step=3), fds.zero_one_adam(local_step_clipper=2)], ids=str)
def test_groups_that_change_at_other_times_are_refused(other):
    with pytest.raises(OptimizerError, match="for all optimizers or for none"):
        fds.by_name({"b": fds.zero_one_adam(), "*": other})


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_has_no_variance_stays_between_agreements_too(ranks):
    """A row whose gradients are 0 while sums update the variance would be thrown by a step of its gradient over eps."""

    def run():
        seen = []

        def loss(p, ids):
            seen.append(p["e"].detach().clone())
            return p["e"][ids].square().sum()

        shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=0)
        optimizer = fds.zero_one_adam(0.01, 2, local_step_scaler=1, local_step_clipper=4)
        step = fds.compose(shard, optimizer)(loss)
        state = step.init({"e": torch.ones(4, 3)})
        for t in range(9):
            state, _ = step(state, torch.tensor([0, 1 if t < 2 else 3]))
        assert len(seen) == 9 and (seen[-1][0] != 1).all()
        return [x[2:] for x in (*seen, state.params["e"], state.slots["local_momentum"]["e"] + 1)]

    for rows in fds.simulate(run, ranks):
        assert_same_bits(rows, [torch.ones(2, 3)] * len(rows))
