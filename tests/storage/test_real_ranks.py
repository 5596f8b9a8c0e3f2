"""Two processes over gloo: what they save together, and what is left when one of them is killed."""

from pathlib import Path

import torch

import fds
from fds import tree
from tests import ranks
from tests.bits import assert_same_bits
from tests.storage import killing_ranks
from tests.storage.topologies import Topology, plain

PARAMS = {"w": torch.arange(100.0).view(4, 25), "b": torch.ones(3)}


def make_step(*sharding):
    loss = lambda params, batch: (batch @ params["w"]).square().mean() + params["b"].sum()
    return fds.compose(*sharding, fds.adamw(0.1), fds.ema(0.9), fds.loss_scale(2.0**5))(loss)


def train_and_save(dir, stage):
    step = make_step(Topology(2, stage, 64).shard())
    state, _ = step(step.init(PARAMS), torch.ones(2, 4))
    folder = fds.save(dir, state, step, extra={"position": 7})
    again, extra = fds.load(dir, step, PARAMS)
    assert_same_bits(again, state)
    return str(folder), extra, plain(state, step)


def load(dir, stage):
    step = make_step(Topology(2, stage).shard())
    return plain(fds.load(dir, step, PARAMS)[0], step)


def fail(dir):
    """Return what each rank is told when the second one cannot save, and then that both can."""
    step = make_step(Topology(2, 1).shard())
    state = step.init(PARAMS)
    try:
        fds.save(dir, state, step, extra={"a": (1,)} if fds.mesh(dp=-1).rank else None)
    except fds.errors.StorageError as error:
        fds.save(dir, state, step)
        return error.what


def test_two_processes_save_and_load(tmp_path):
    (folder, extra, want), (other, _, _) = ranks.run(train_and_save, str(tmp_path), 1)
    assert folder == other == str(tmp_path / "step00000001") and extra == {"position": 7}
    assert sorted(p.name for p in Path(folder).iterdir()) == ["manifest.json", "rank0.safetensors", "rank1.safetensors"]
    assert_same_bits(ranks.run(load, str(tmp_path), 3)[1], want)
    alone, _ = fds.load(tmp_path, make_step(), PARAMS)
    assert_same_bits(tree.paths(alone), want)


def test_an_error_on_one_process_is_told_to_the_other(tmp_path):
    assert ranks.run(fail, str(tmp_path)) == ["rank 1: extra has a value that JSON would change"] * 2


def test_one_of_two_processes_is_killed_and_the_last_complete_save_loads(tmp_path):
    status, told = ranks.alone(killing_ranks.main, tmp_path)
    assert status == 0, told
    assert told.count(" kills, ") == 5
