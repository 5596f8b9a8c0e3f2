"""1-bit Adam: the algorithm of the paper written plainly, and what of its messages is sent, kept and carried on."""

import math
import os
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import fds
from fds.errors import ComposeError, OptimizerError
from fds.optim import exchange
from fds.optim.exchange import signed_bytes, signed_sums
from tests.bits import assert_same_bits

SHAPES = {"w": (13, 5), "b": (3,), "one": (1,), "v": (8, 16)}
STEPS = 200 if os.environ.get("FDS_HYPOTHESIS_PROFILE") == "full" else 40


def compressed(x):
    """Return the signs of x (n,), times the root of their mean square."""
    rms = np.float32(np.linalg.norm(x) / math.sqrt(max(x.size, 1)))
    return np.where(x >= 0, rms, -rms).astype(np.float32)


def mean_by_signs(given, worker, server):
    """Return the mean (n,) of what all ranks have (W, n), as in the paper; `worker` and `server` are its errors.

    Every rank is the server of a chunk of whole bytes of signs.
    """
    ranks, n = given.shape
    if ranks == 1:
        return given[0]
    sent = np.stack([compressed(x) for x in given + worker])
    worker[:] = given + worker - sent
    chunk = math.ceil(n / (8 * ranks)) * 8
    out = np.zeros(n, np.float32)
    for at in range(0, n, chunk):
        mine = slice(at, at + chunk)
        c = sent[:, mine].mean(0, dtype=np.float32) + server[mine]
        out[mine] = compressed(c)
        server[mine] = c - out[mine]
    return out


def by_hand(params, gradients, *, lr, freeze_step, betas, weight_decay):
    """Return the parameters after an update for each entry of `gradients`, (W, ...) by name."""
    ranks = len(gradients[0]["w"])
    p = {name: x.numpy().copy() for name, x in params.items()}
    m, v = ({name: np.zeros_like(x) for name, x in p.items()} for _ in range(2))
    errors = {name: (np.zeros((ranks, x.size), np.float32), np.zeros(x.size, np.float32)) for name, x in p.items()}
    for t, by_name in enumerate(gradients):
        for name, g in ((name, g.numpy()) for name, g in by_name.items()):
            if t < freeze_step:
                m[name] = betas[0] * m[name] + (1 - betas[0]) * g.mean(0)
                v[name] = betas[1] * v[name] + (1 - betas[1]) * g.mean(0) ** 2
            else:
                given = (betas[0] * m[name][None] + (1 - betas[0]) * g).reshape(ranks, -1)
                m[name] = mean_by_signs(given.astype(np.float32), *errors[name]).reshape(p[name].shape)
            p[name] = p[name] - lr * (m[name] / (np.sqrt(v[name]) + 1e-8) + weight_decay * p[name])
    return {name: torch.from_numpy(x.astype(np.float32)) for name, x in p.items()}


def drawn(steps, ranks):
    """Return parameters, and gradients (W, ...) by name for every step: of one direction, and apart."""
    draw = torch.Generator().manual_seed(ranks)
    make = lambda *front: {name: torch.randn(*front, *shape, generator=draw) for name, shape in SHAPES.items()}
    each = [(make(1), make(ranks)) for _ in range(steps)]
    return make(), [{name: common[name] + own[name] / 2 for name in SHAPES} for common, own in each]


def composed(optimizer, *more):
    """Compose for the ranks that run, with a loss whose gradients are the batch."""
    axis = fds.mesh(dp=-1)["dp"]
    loss = lambda p, g: sum((p[name] * x[0]).sum() for name, x in g.items())
    return fds.compose(fds.shard_optimizer(axis, stage=0), *more, optimizer)(loss), axis.index


def trained(optimizer, params, gradients, *more):
    """Return every rank's parameters, and state, after these gradients."""

    def run():
        step, rank = composed(optimizer, *more)
        state = step.init(params)
        for by_name in gradients:
            state, _ = step(state, {name: g[rank][None] for name, g in by_name.items()})
        return step.params(state), state

    return fds.simulate(run, len(gradients[0]["w"]))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_is_the_algorithm_of_the_paper_and_all_ranks_agree(ranks):
    params, gradients = drawn(STEPS, ranks)
    arguments = {"lr": 0.01, "freeze_step": 10, "betas": (0.8, 0.95), "weight_decay": 0.1}
    want = by_hand(params, gradients, **arguments)
    (first, _), *_ = found = trained(fds.onebit_adam(**arguments), params, gradients)
    for got, state in found:
        assert_same_bits(got, first)
        assert_same_bits(state.opt, found[0][1].opt)
    for name, x in want.items():
        torch.testing.assert_close(first[name], x, rtol=0, atol=STEPS * 2**-23)  # a rounding of 1 an update


def test_a_mask_keeps_the_momentum_of_rows_that_have_no_gradient_any_more_at_zero():
    params, gradients = drawn(20, 2)
    for by_name in gradients[5:]:
        by_name["w"][:, 5:] = 0
    mask = (torch.arange(13) < 5).float()[:, None]
    optimizer = lambda **mask: fds.onebit_adam(0.01, freeze_step=5, **mask)
    (masked, state), _ = trained(optimizer(exp_avg_mask={"w*": mask}), params, gradients)
    assert not state.opt["exp_avg"]["w"][5:].any() and state.opt["exp_avg"]["w"][:5].all()
    (plain, state), _ = trained(optimizer(), params, gradients)
    assert state.opt["exp_avg"]["w"][5:].all()
    for name in SHAPES.keys() - {"w"}:
        assert torch.equal(masked[name], plain[name])


SHORT = [fds.onebit_adam(0.01, freeze_step=3), fds.onebit_lamb(0.01, freeze_step=3)]


@pytest.mark.parametrize("optimizer", SHORT, ids=str)
def test_elements_without_a_gradient_in_warm_up_stay_where_they_are(optimizer):
    params, gradients = drawn(8, 2)
    for by_name in gradients[:3]:
        by_name["w"][:, 5:] = 0
    (got, state), (other, _) = trained(optimizer, params, gradients)
    assert_same_bits(got, other)
    assert torch.equal(got["w"][5:], params["w"][5:]) and not state.opt["exp_avg"]["w"][5:].any()
    assert ((got["w"][:5] - params["w"][:5]).abs() > 0).all()
    half = {name: x.half() for name, x in params.items()}  # in which eps is 0
    (got, _), _ = trained(optimizer, half, gradients)
    assert torch.equal(got["w"][5:], half["w"][5:]) and all(x.isfinite().all() for x in got.values())


@pytest.mark.parametrize("optimizer", SHORT, ids=str)
def test_nothing_moves_where_all_of_warm_up_is_skipped_and_steps_say_so(optimizer):
    params, gradients = drawn(6, 2)

    def run():
        step, rank = composed(optimizer, fds.skip_nonfinite())
        state, steps = step.init(params), []
        for t, by_name in enumerate(gradients):
            bad = torch.nan if t < 3 and rank == 1 else 1.0
            state, metrics = step(state, {name: g[rank][None] * bad for name, g in by_name.items()})
            steps.append(int(metrics["step"]))
        assert_same_bits(step.params(state), params)
        return steps, bool(metrics["skipped"])

    assert fds.simulate(run, 2) == [([0, 0, 0, 1, 2, 3], False)] * 2


def test_groups_send_by_themselves_as_all_together_do():
    params, gradients = drawn(12, 3)
    one = fds.onebit_adam(0.01, freeze_step=4)
    (want, _), *_ = trained(one, params, gradients)
    (got, _), *_ = trained(fds.by_name({"[bo]*": one, "*": fds.onebit_adam(0.01, freeze_step=4)}), params, gradients)
    assert_same_bits(got, want)


@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=4), st.integers(2, 4), st.integers(0, 3), st.sampled_from([8, 16])
)
def test_what_arrives_and_what_is_kept_is_what_was_given(lengths, ranks, seed, block):
    def run():
        axis = fds.mesh(dp=-1)["dp"]
        draw = torch.Generator().manual_seed(seed * 10 + axis.index)
        make = lambda: [torch.randn(n, generator=draw) for n in lengths]
        given, worker, server = make(), make(), make()  # errors of a server lie anywhere: the number of ranks changed
        before = [x + w + s for x, w, s in zip(given, worker, server, strict=True)]
        sizes = [x.abs() + w.abs() + s.abs() for x, w, s in zip(given, worker, server, strict=True)]
        with fds.collectives.counted() as traffic:
            sums = list(signed_sums(axis, given, worker, server))
        assert sum(one.bytes_sent for one in traffic.counts.values()) == signed_bytes(lengths, axis.size)
        kept = [w + s for w, s in zip(worker, server, strict=True)]
        over = lambda xs: [axis.all_reduce(x.double()) for x in xs]
        return sums, over(before), over(kept), over(sizes)

    with mock.patch.object(exchange, "BLOCK", block):
        found = fds.simulate(run, ranks)
    for sums, before, kept, sizes in found:
        assert_same_bits(sums, found[0][0])
        for total, whole, rest, size in zip(sums, before, kept, sizes, strict=True):
            rounding = 2**-24 * 4 * ranks * float(size.max() + rest.abs().max())  # additions
            torch.testing.assert_close(total + rest, whole, rtol=0, atol=rounding)


def test_low_precision_parameters_send_their_momentum_in_float32():
    """Compared are six updates, two of them by signs: later on, rounding decides the sign of a momentum near 0."""
    params, gradients = drawn(6, 2)
    low = {name: x.bfloat16() for name, x in params.items()}
    (got, state), (other, _) = trained(fds.onebit_adam(0.01, freeze_step=4), low, gradients)
    assert_same_bits(got, other)
    assert {x.dtype for x in state.opt["exp_avg"].values()} == {torch.bfloat16}
    assert {x.dtype for x in state.slots["worker_error"].values()} == {torch.float32}
    (want, _), _ = trained(fds.onebit_adam(0.01, freeze_step=4), params, gradients)
    for name, x in want.items():
        assert (got[name] - x).norm() < 0.02 * x.norm()


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"lr": -1.0}, "lr"),
        ({"eps": -1e-8}, "eps"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]"),
        ({"weight_decay": "0.1"}, "weight_decay"),
        ({"freeze_step": 0}, "freeze_step"),
        ({"freeze_step": 1.5}, "freeze_step"),
        ({"freeze_step": True}, "freeze_step"),
        ({"exp_avg_mask": [1]}, "exp_avg_mask"),
        ({"exp_avg_mask": {"w": 1.0}}, "exp_avg_mask"),
    ],
)
def test_bad_arguments_are_refused(arguments, where):
    with pytest.raises(OptimizerError, match=where):
        fds.onebit_adam(**arguments)


@pytest.mark.parametrize(
    ("mask", "where"),
    [
        ({"wight": torch.ones(1)}, "wight"),
        ({"w": torch.ones(2, 5)}, r"exp_avg_mask, w\n(?s:.*)\(2, 5\)"),
        ({"w": torch.ones(1, 13, 5)}, r"exp_avg_mask, w"),
    ],
)
def test_masks_that_do_not_fit_are_refused_by_init(mask, where):
    step = fds.compose(fds.onebit_adam(exp_avg_mask=mask))(lambda p, batch: p["w"].sum())
    with pytest.raises(OptimizerError, match=where):
        step.init(drawn(0, 1)[0])


@pytest.mark.parametrize("other", [fds.adamw(), fds.onebit_adam(freeze_step=3)], ids=str)
def test_groups_that_change_at_other_times_are_refused(other):
    with pytest.raises(OptimizerError, match="for all optimizers or for none"):
        fds.by_name({"b": fds.onebit_adam(freeze_step=2), "*": other})


def refused(*more, stage=0):
    def run():
        shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)
        with pytest.raises(ComposeError) as caught:
            fds.compose(shard, *more, fds.onebit_adam())(lambda p, batch: p["w"].sum())
        return str(caught.value)

    return fds.simulate(run, 2)[0]


def test_what_needs_the_whole_gradient_is_refused_with_what_to_write_instead():
    for stage in (1, 2, 3):
        assert "gradients=fds.transports.onebit()" in refused(stage=stage)
    assert "a gradient map needs the whole gradient" in refused(fds.clip_by_value(1.0))
    assert "offload" in refused(fds.offload(moments="host"))


def test_local_updates_are_refused():
    def run():
        mesh = fds.mesh(replica=2)
        with pytest.raises(ComposeError, match="ranks agree on parameters now and then"):
            fds.compose(fds.local_updates(mesh["replica"], every=2), fds.onebit_adam())(lambda p, batch: p["w"].sum())
        return True

    assert fds.simulate(run, 2) == [True, True]
