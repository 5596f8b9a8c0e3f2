"""Saves of many ranks beside law 9: what it does not draw, and how the files are shared."""

import json
from typing import NamedTuple

import attrs
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import fds
from fds import tree
from fds.layout import Sharded
from fds.step import Memory
from fds.storage.disk import reader
from fds.storage.disk.writer import ALIGN
from fds.storage.format import manifest
from fds.storage.format.tensors import DTYPES
from fds.storage.ranks.sharing import CUT
from tests.bits import assert_same_bits
from tests.laws.problems import problems
from tests.storage.topologies import Topology, compose, plain, saved, topologies, train

STAGES = st.integers(0, 3)


@settings(max_examples=10)
@given(problems(), st.integers(2, 4), STAGES, STAGES)
def test_training_goes_on_at_another_stage_as_it_would_have(tmp_path_factory, problem, ranks, one, other):
    """With one microbatch and no norm, the order of summation is the same at every stage."""
    dir = tmp_path_factory.mktemp("run")
    step_on = lambda topology: compose(problem, "adamw", ["ema"], topology)
    states, _ = saved(dir, step_on, problem, Topology(ranks, one), 2)

    def resume():
        step = step_on(Topology(ranks, other, 64))
        return plain(train(step, fds.load(dir, step, problem.params)[0], problem, 2), step)

    def straight():
        step = step_on(Topology(ranks, one))
        return plain(train(step, states[fds.mesh(dp=-1).rank], problem, 2), step)

    assert_same_bits(fds.simulate(resume, ranks)[0], fds.simulate(straight, ranks)[0])


@settings(max_examples=10)
@given(problems(), st.sampled_from(["adamw", "groups"]), topologies())
def test_one_rank_without_sharding_loads_and_saves_for_all(tmp_path_factory, problem, optimizer, topology):
    dir = tmp_path_factory.mktemp("run")
    step_on = lambda topology: compose(problem, optimizer, ["ema", "loss_scale"], topology)
    _, want = saved(dir, step_on, problem, topology, 1)
    step = step_on(None)
    state, _ = fds.load(dir, step, problem.params)
    assert_same_bits(tree.paths(state), want)
    after = train(step, state, problem, 1)
    fds.save(dir, after, step)

    def load():
        step = step_on(topology)
        return plain(fds.load(dir, step, problem.params)[0], step)

    assert_same_bits(topology.run(load)[0], tree.paths(after))


def matrices_and_more():
    """Matrices for Muon, a vector and a scalar for AdamW, an empty one, integers, and one that trains not at all."""
    params = {
        "a": torch.arange(12.0).view(4, 3),
        "b": torch.ones(3, 7),
        "c": torch.ones(2, 2),
        "bias": torch.ones(5),
        "scalar": torch.tensor(2.0),
        "empty": torch.ones(0, 3),
        "index": torch.arange(3),
        "": {"x.y": torch.ones(1)},
    }

    def loss(params, batch):
        out = batch @ params["a"] @ params["b"]
        return (out**2).mean() * params["scalar"] + params["bias"].sum() + params["c"].sin().sum()

    return params, loss


def muon_and_adamw():
    return fds.by_name({"[abc]": fds.muon(0.1), "bias": fds.sgd(0.1), "*": fds.adamw(0.1)})


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_matrices_and_slots_that_some_buckets_lack(tmp_path, stage):
    params, loss = matrices_and_more()

    def make(topology):
        return fds.compose(fds.freeze("c"), topology.shard(), muon_and_adamw(), fds.ema(0.9))(loss)

    def save():
        step = make(Topology(3, stage, 64))
        state, _ = step(step.init(params), torch.ones(2, 4) * (1 + fds.mesh(dp=-1).rank))
        return fds.save(tmp_path, state, step), plain(state, step)

    folder, want = fds.simulate(save, 3)[0]
    assert set(want) >= {"opt.momentum_buffer.a", "opt.exp_avg.scalar", "opt.exp_avg.empty", "params..x.y"}
    assert "opt.exp_avg.a" not in want and "opt.exp_avg.bias" not in want and "opt.momentum_buffer.c" not in want
    leaves = manifest.read_manifest(folder).leaves
    assert {name: leaf.shape for name, leaf in leaves.items()} == {name: tuple(x.shape) for name, x in want.items()}
    assert all(len(leaves[f"opt.momentum_buffer.{name}"].chunks) == 1 for name in "ab")

    def load():
        step = make(Topology(2, 2))
        return plain(fds.load(tmp_path, step, params)[0], step)

    assert_same_bits(fds.simulate(load, 2)[1], want)


@pytest.mark.parametrize("params", [torch.arange(40.0), [torch.ones(3), (torch.zeros(2, 9),)], {"": torch.ones(20)}])
def test_any_tree_of_parameters(tmp_path, params):
    loss = lambda params, batch: sum((x * batch).sum() for x in tree.leaves(params))

    def body():
        step = fds.compose(Topology(2, 2).shard(), fds.adam(0.1))(loss)
        state, _ = step(step.init(params), torch.tensor(1.0))
        fds.save(tmp_path, state, step)
        return plain(state, step)

    want = fds.simulate(body, 2)[0]
    step = fds.compose(fds.adam(0.1))(loss)
    state, _ = fds.load(tmp_path, step, params)
    assert_same_bits(tree.paths(state), want)


def wide(width=64):
    apply, params, _ = fds.functional(nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 2)))
    return params, lambda params, batch: apply(params, batch).square().mean()


@pytest.mark.parametrize(
    "topology",
    [Topology(4, 0), Topology(4, 1), Topology(4, 1, replicas=2), Topology(4, 3, replicas=2), Topology(3, 3, 300)],
    ids=str,
)
def test_every_element_is_written_once_by_ranks_that_share_the_load(tmp_path, topology):
    params, loss = wide(4096)

    def body():
        step = fds.compose(topology.shard(), fds.adamw(0.1))(loss)
        state, _ = step(step.init(params), torch.ones(2, 16))
        return fds.save(tmp_path, state, step)

    folder = topology.run(body)[0]
    record, shares = manifest.read_manifest(folder), dict.fromkeys(range(topology.ranks), 0)
    for leaf in record.leaves.values():
        for chunk in leaf.chunks:
            shares[int(chunk.file[4])] += chunk.length * DTYPES[leaf.dtype].itemsize
    total = 3 * 4 * sum(x.numel() for x in tree.leaves(params)) + 8 + 8 + 16
    assert sum(shares.values()) == total  # no padding, no copies
    padding = 0 if topology.stage == 0 else 3 * 4 * 32 * topology.ranks * (8 if topology.bucket_bytes < 2**20 else 1)
    assert all(abs(share - total / topology.ranks) < 2 * CUT + padding for share in shares.values()), shares
    sizes = {int(p.name[4]): p.stat().st_size - shares[int(p.name[4])] for p in folder.glob("rank*")}
    assert sizes.keys() == shares.keys() and set(sizes.values()) == {ALIGN}  # headers


def test_ranks_open_only_files_that_they_need(tmp_path, monkeypatch):
    params, loss = wide()
    step_on = lambda: fds.compose(Topology(3, 1, 2**20).shard(), fds.sgd(0.1))(loss)

    def save():
        step = step_on()
        return fds.save(tmp_path, step.init(params), step)

    leaves = manifest.read_manifest(fds.simulate(save, 3)[0]).leaves
    opened, plain_read = [], reader.Files.read

    def read(self, file, offset, out, checksum, where):
        opened.append((fds.mesh(dp=-1).rank, file))
        return plain_read(self, file, offset, out, checksum, where)

    monkeypatch.setattr(reader.Files, "read", read)
    fds.simulate(lambda: fds.load(tmp_path, step_on(), params), 3)
    own = {(rank, f"rank{rank}.safetensors") for rank in range(3)}
    shared = {leaves[name].chunks[0].file for name in ("step", "calls", "key")}
    assert set(opened) == own | {(rank, file) for rank in range(3) for file in shared} and len(set(opened)) < 9


def test_what_the_host_reads_stays_on_the_host(tmp_path):
    params, loss = wide()

    def body():
        step = fds.compose(Topology(2, 1).shard(), fds.sgd(0.1), fds.loss_scale())(loss)
        state = step.init(params)
        fds.save(tmp_path, state, step)
        with torch.device("meta"):  # the only other device of every machine
            loaded, _ = fds.load(tmp_path, step, tree.map(lambda x: x.to("meta"), params))
        assert isinstance(loaded.params, Sharded)
        return {name for name, x in tree.paths(loaded).items() if not x.is_meta}

    assert fds.simulate(body, 2) == [{"calls", "key"}] * 2


def test_other_programs_can_read_a_save_of_many_ranks(tmp_path):
    from safetensors.torch import load_file

    params, loss = wide()

    def body():
        step = fds.compose(Topology(3, 3, 300).shard(), fds.sgd(0.1))(loss)
        state = step.init(params)
        return fds.save(tmp_path, state, step), plain(state, step)

    folder, want = fds.simulate(body, 3)[0]
    record = json.loads((folder / "manifest.json").read_text())
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    for name, leaf in record["leaves"].items():
        pieces = [files[chunk["file"]][name].view(-1) for chunk in leaf["chunks"]]
        assert_same_bits(torch.cat(pieces).view(leaf["shape"]), want[name])


class Two(NamedTuple):
    """A slot of another make."""

    fast: object
    slow: object


@tree.record
class Held:
    """A slot of yet another make."""

    mean: object
    count: torch.Tensor


def test_slots_that_hold_parameters_anywhere(tmp_path):
    params, loss = wide()
    copy = lambda params: tree.map(torch.clone, params)

    def slot(params, device):
        count = torch.ones((), device=device)
        return {"a": [copy(params), count], "b": Held(copy(params), count), "c": (Two(copy(params), count),)}

    def make(*sharding):
        step = fds.compose(*sharding, fds.sgd(0.1))(loss)
        return attrs.evolve(step, memory={"mine": Memory("mine", slot, "parameters")})

    def save():
        step = make(Topology(3, 1, 300).shard())
        fds.save(tmp_path, step.init(params), step)

    fds.simulate(save, 3)
    step = make()
    state, _ = fds.load(tmp_path, step, params)
    assert_same_bits(state, step.init(params))

    def load():
        step = make(Topology(2, 3).shard())
        assert_same_bits(fds.load(tmp_path, step, params)[0], step.init(params))

    fds.simulate(load, 2)
