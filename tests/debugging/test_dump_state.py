"""A dump names every leaf with what it takes and where it lives, as the state itself says."""

import pytest
import torch
from torch import nn

import fds
from fds.config import TrainingConfig
from fds.errors import FdsError


def loss(params, batch):
    return (batch @ params["w"]).square().mean() + params["b"].sum()


def params():
    return {"w": torch.ones(4, 3), "b": torch.ones(2)}


def test_every_leaf_has_its_line_with_shape_dtype_bytes_and_place(tmp_path):
    placed = fds.offload(moments="host", masters=fds.disk(tmp_path))
    step = fds.compose(placed, fds.loss_scale(initial=512.0), fds.adamw(0.01))(loss)
    state, _ = step(step.init(params()), torch.ones(2, 4))
    text = fds.dump_state(state, step)
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    leaves = fds.tree.paths(state)
    for path, x in leaves.items():
        assert f"{tuple(x.shape)}" in lines[path] and f"{x.nbytes:,}" in lines[path], path
    assert lines["params.w"].endswith(f"disk {tmp_path}") and lines["opt.exp_avg.w"].endswith("host")
    assert repr(step) in text and str(step.describe(state)) in text
    assert "\ncalls      1\n" in text and "\nslots.loss_scale.scale 512.0\n" in text
    assert text.endswith(f"{len(leaves)} leaves, {fds.tree.num_bytes(state):,} bytes")


def test_a_slice_names_what_is_in_it_and_a_rank_itself():
    def rank():
        step = fds.compose(fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=1), fds.adamw(0.01))(loss)
        return fds.dump_state(step.init(params()), step)

    first, second = fds.simulate(rank, 2)
    assert "rank 0 of 2" in first and "rank 1 of 2" in second
    assert next(line for line in first.splitlines() if line.startswith("params.buckets")).endswith("w, b")


@pytest.mark.parametrize("asked", [True, False])
def test_the_key_of_the_configuration_prints_it_on_the_first_rank(asked, capsys):
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "dump_state": asked}

    def rank():
        torch.manual_seed(0)
        step, state, _, _ = fds.initialize(nn.Linear(3, 1), lambda model, x: model(x).square().mean(), config=config)
        return step, state

    ranks = fds.simulate(rank, 2)
    printed = capsys.readouterr().out
    assert printed.count("params.weight") == asked and printed.count("rank 0 of 2") == asked
    fds.simulate(lambda: TrainingConfig.of(config).dump_state(ranks[0][1], ranks[0][0]), 1)
    assert capsys.readouterr().out == printed


def test_what_is_no_step_or_state_is_named():
    step = fds.compose(fds.adamw(0.01))(loss)
    with pytest.raises(FdsError, match="not a step"):
        fds.dump_state(step, step.init(params()))
    with pytest.raises(FdsError, match="not a state"):
        fds.dump_state(None, step)
