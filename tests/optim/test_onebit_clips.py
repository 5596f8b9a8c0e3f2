"""1-bit optimizers with a clip: of the whole gradient in warm-up, then of each rank's own, beside the loop by hand."""

import pytest
import torch

import fds
from tests.optim.test_onebit_adam import by_hand, drawn, trained

CLIP = 4.0  # some gradients are longer, and some are not


def clipped(by_name):
    """Return gradients (...) by name as `clip_grad_norm_` of torch makes them, each entry along dim 0 by itself."""
    rows = [{name: x[r].clone() for name, x in by_name.items()} for r in range(len(by_name["w"]))]
    for row in rows:
        params = [torch.nn.Parameter(torch.zeros_like(x)) for x in row.values()]
        for p, x in zip(params, row.values(), strict=True):
            p.grad = x
        torch.nn.utils.clip_grad_norm_(params, CLIP)
    return {name: torch.stack([row[name] for row in rows]) for name in by_name}


def sizes(by_name, factor):
    """Return the gradients of a call on each rank, longer and shorter than the clip."""
    return {name: x * factor for name, x in by_name.items()}


def long_and_short(steps, ranks):
    params, gradients = drawn(steps, ranks)
    return params, [sizes(one, 2.0 if t % 3 else 0.1) for t, one in enumerate(gradients)]


@pytest.mark.sweep
@pytest.mark.parametrize("more", [[], [fds.loss_scale(2.0**10)]], ids=["", "scaled"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_after_warm_up_each_rank_clips_its_own_gradient(ranks, more):
    params, gradients = long_and_short(16, ranks)
    for by_name in gradients:  # one rank's are longer than the clip where the others' are not
        for x in by_name.values():
            x[-1] *= 3
    arguments = {"lr": 0.01, "freeze_step": 6, "betas": (0.8, 0.95), "weight_decay": 0.1}
    means = lambda one: {name: x.mean(0, keepdim=True).expand_as(x) for name, x in one.items()}
    given = [clipped(means(one) if t < 6 or ranks == 1 else one) for t, one in enumerate(gradients)]
    want = by_hand(params, given, **arguments)
    for got, _ in trained(fds.onebit_adam(**arguments), params, gradients, fds.clip_by_global_norm(CLIP), *more):
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, rtol=0, atol=16 * 2**-21)


@pytest.mark.parametrize(
    "optimizer",
    [
        fds.onebit_lamb(0.01, freeze_step=4),
        fds.zero_one_adam(0.01, var_freeze_step=6, var_update_scaler=2, local_step_scaler=2, local_step_clipper=2),
    ],
    ids=["lamb", "0/1"],
)
def test_clipping_is_training_on_clipped_gradients(optimizer):
    params, gradients = long_and_short(12, 2)
    local = optimizer.phases.local
    means = lambda one: {name: x.mean(0, keepdim=True).expand_as(x).clone() for name, x in one.items()}
    given = [clipped(one if local(t) else means(one)) for t, one in enumerate(gradients)]
    want = trained(optimizer, params, given)
    got = trained(optimizer, params, gradients, fds.clip_by_global_norm(CLIP))
    assert any(not torch.equal(x[name], given[t][name]) for t, x in enumerate(gradients) for name in x)
    for (x, _), (y, _) in zip(got, want, strict=True):
        for name in x:
            torch.testing.assert_close(x[name], y[name], rtol=0, atol=12 * 2**-21)


def test_the_norm_of_a_rank_in_stages_is_of_all_its_stages():
    """Of a pipeline a rank's own gradient lies on several ranks."""
    torch.manual_seed(0)
    layers = fds.Layers([torch.nn.Linear(4, 4), torch.tanh, torch.nn.Linear(4, 3)], torch.nn.MSELoss())
    params, rows = layers.init(fds.random.key(0)), (torch.randn(8, 4) * 30, torch.randn(8, 3) * 30)

    def run(stages):
        mesh = fds.mesh(pp=stages, dp=2)
        cut = [fds.pipeline(fds.plans.gpipe, mesh["pp"], num_microbatches=2)] if stages > 1 else [fds.accumulate(2)]
        optimizer = fds.onebit_adam(0.01, freeze_step=2)
        clip = fds.clip_by_global_norm(0.5)
        step = fds.compose(*cut, fds.shard_optimizer(mesh["dp"], stage=0), clip, optimizer)(layers)
        state, mine = step.init(params), tuple(x.chunk(2)[mesh["dp"].index] * (1 + mesh["dp"].index) for x in rows)
        for _ in range(4):
            state, _ = step(state, mine)
        if stages > 1:
            assert "each rank's own" in step.describe().stations["condition"]
        return step.params(state)

    one, *_ = fds.simulate(lambda: run(1), 2)
    for got in fds.simulate(lambda: run(2), 4):
        for name, x in one.items():
            torch.testing.assert_close(got[name], x, rtol=0, atol=4 * 2**-20)
