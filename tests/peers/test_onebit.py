"""1-bit optimizers beside DeepSpeed's own classes, bit for bit."""

import pytest
import torch

import fds
from tests.bits import assert_same_bits
from tests.peers.onebit import gradients, params, train

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]


def by_fds(optimizer, steps, ranks, *more):
    def run():
        axis = fds.mesh(dp=-1)["dp"]
        loss = lambda p, g: sum((p[name] * x[0]).sum() for name, x in g.items())
        step = fds.compose(fds.shard_optimizer(axis, stage=0), *more, optimizer)(loss)
        state = step.init(params())
        for t in range(steps):
            state, _ = step(state, {name: x[None] for name, x in gradients(t, axis.index).items()})
        return step.params(state)

    return fds.simulate(run, ranks)[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_onebit_adam_is_deepspeeds(ranks, tmp_path):
    arguments = {"lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.95]}
    theirs = train("onebit_adam", 200, ranks, tmp_path / "out", freeze_step=21, **arguments)
    assert_same_bits(by_fds(fds.onebit_adam(freeze_step=20, **arguments), 200, ranks), theirs)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_onebit_lamb_is_deepspeeds_of_one_parameter(ranks, tmp_path):
    arguments = {"lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.95], "coeff_beta": 0.7, "factor_threshold": 0.05}
    theirs = train("onebit_lamb", 200, ranks, tmp_path / "out", freeze_step=21, apart=True, **arguments)
    assert_same_bits(by_fds(fds.onebit_lamb(freeze_step=20, **arguments), 200, ranks), theirs)


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb"])
def test_clips_are_deepspeeds_by_the_norm_of_what_a_rank_has(name, tmp_path):
    arguments = {"lr": 0.01, "weight_decay": 0.1, "betas": [0.8, 0.95]}
    theirs = train(name, 40, 2, tmp_path / "out", freeze_step=21, clip=5.0, apart=name == "onebit_lamb", **arguments)
    optimizer = getattr(fds, name)(freeze_step=20, **arguments)
    ours = by_fds(optimizer, 40, 2, fds.clip_by_global_norm(5.0))
    unclipped = by_fds(optimizer, 40, 2)
    for key, x in ours.items():
        torch.testing.assert_close(x, theirs[key], rtol=0, atol=40 * 2**-23)
        assert (x - unclipped[key]).abs().max() > 1e-3


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_zero_one_adam_is_deepspeeds_where_all_ranks_go_back_to_the_same(ranks, decay, tmp_path):
    arguments = {"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": decay}
    arguments |= {"var_update_scaler": 200 if ranks == 1 else 8, "local_step_scaler": 1000 if decay else 30}
    theirs = train("zero_one_adam", 200, ranks, tmp_path / "out", var_freeze_step=79, **arguments)
    ours = by_fds(fds.zero_one_adam(var_freeze_step=80, **arguments), 200, ranks)
    if ranks > 1:
        return assert_same_bits(ours, theirs)
    for name, x in ours.items():  # alone it goes back with a rounding
        torch.testing.assert_close(x, theirs[name], rtol=0, atol=200 * 2**-23)
