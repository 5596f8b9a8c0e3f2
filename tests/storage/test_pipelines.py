"""Law 9, across pipelines: what any of them saved is the plain state, and any other topology loads it."""

import functools
import os
from pathlib import Path

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import plans, tree
from fds.errors import StorageError
from fds.step import Memory
from fds.storage.disk import reader, writer
from fds.storage.format import manifest
from tests import ranks
from tests.bits import assert_rounding, assert_same_bits, bits
from tests.laws.problems import Block, language, token_mean
from tests.storage.states import rewrite
from tests.storage.topologies import Stages, plain

BATCH = language(0)

TOPOLOGIES = {
    "plain": None,
    "serial": Stages(3, plans.zb_h1, alone=True),
    "pp2": Stages(2, partition=[0, 3, 8]),
    "pp3, tied at both ends": Stages(3, plans.zb_h1),
    "pp3, one without parameters": Stages(3, plans.gpipe, partition=[0, 1, 2, 8]),
    "zb_v": Stages(2, plans.zb_v),
    "pp2 x dp2, stage 0": Stages(2, plans.gpipe, 2, 0),
    "pp2 x dp2, stage 1": Stages(2, plans.one_f_one_b, 2, 1),
    "pp2 x dp2, stage 2": Stages(2, plans.zb_h1, 2, 2, bucket_bytes=2**20),
    "pp2 x dp2, stage 3": Stages(2, plans.one_f_one_b, 2, 3),
    "pp3 x dp2, one without parameters": Stages(3, plans.gpipe, 2, 1, partition=[0, 1, 2, 8]),
    "pp2 x dp2 x 2 copies": Stages(2, plans.zb_h1, 2, 1, replicas=2),
}


def layers(width: int = 6) -> fds.Layers:
    """Tied ends, a layer without parameters at each second place, statistics in the middle."""
    logits = lambda embed, x: F.linear(x, embed.weight)
    return fds.Layers(
        [
            fds.TiedLayerSpec("embed", nn.Embedding, 7, width),
            torch.tanh,
            fds.LayerSpec(Block, width, 0.1),
            fds.LayerSpec(nn.BatchNorm1d, 4),
            nn.Dropout(0.1),
            fds.LayerSpec(Block, width, 0.1),
            fds.LayerSpec(nn.LayerNorm, width),
            fds.TiedLayerSpec("embed", nn.Embedding, 7, width, forward_fn=logits),
        ],
        token_mean,
    )


def make(topology: Stages | None, *more, loss=None) -> fds.Step:
    """Compose on a rank of a topology; Adam's eps is large so that rounding is not magnified."""
    places = [fds.accumulate(4)] if topology is None else topology.transforms()
    kept = more or (fds.adam(0.01, eps=0.1), fds.ema(0.9), fds.loss_scale(2.0**5))
    return fds.compose(*places, *kept)(loss or layers())


def run(topology: Stages | None, body) -> list:
    """Return what `body()` returns on every rank of a topology."""
    return [body()] if topology is None else topology.run(body)


def train(step: fds.Step, state: fds.State, calls: int) -> fds.State:
    """Return the state after so many calls, each with the rows that its data rank has of the batch."""
    shard = step.shard
    rows = slice(None) if shard is None else slice(shard.data.index, None, shard.data.size)
    size = 3 if shard is None else BATCH[0].shape[0] // shard.data.size
    mine = tuple(x if shard is None else x.view(-1, size, *x.shape[1:])[rows].flatten(0, 1) for x in BATCH)
    for _ in range(calls):
        state, _ = step(state, mine)
    return state


def joined(found: list[dict]) -> dict:
    """Return the plain state's leaves, given those of every rank; what several have they have alike."""
    whole: dict = {}
    for leaves in found:
        both = whole.keys() & leaves.keys()
        assert_same_bits({n: leaves[n] for n in both}, {n: whole[n] for n in both})
        whole |= leaves
    return whole


def in_order(leaves: dict) -> dict:
    return dict(sorted(leaves.items()))


def saved(dir, topology: Stages | None, calls: int = 2, *more) -> tuple[list[fds.State], dict]:
    """Train and save; return every rank's state, and the leaves of the plain one, which fds.storage has not touched."""

    def body():
        step = make(topology, *more)
        state = train(step, step.init(step.loss.init, key=3), calls)
        return state, plain(state, step), fds.save(dir, state, step, extra={"position": calls})

    states, found, folders = zip(*run(topology, body), strict=True)
    assert set(folders) == {Path(dir) / f"step{calls:08d}"}
    return list(states), joined(found)


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    """Save each topology once; a name gives the directory, every rank's state, and the leaves of the plain one."""

    @functools.cache
    def save(name: str) -> tuple[Path, list[fds.State], dict]:
        dir = tmp_path_factory.mktemp("saves")
        return dir, *saved(dir, TOPOLOGIES[name])

    return save


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_what_one_topology_saved_any_other_loads_bit_for_bit(saves, tmp_path, name):
    names = list(TOPOLOGIES)
    one, at = TOPOLOGIES[name], names.index(name)
    dir, states, want = saves(name)
    for i in (1, 6):  # so that each is saved for two others, and loads from two; law 9 draws any two
        other = TOPOLOGIES[names[(at + i) % len(names)]]

        def move(other=other):
            step = make(other)
            state, extra = fds.load(dir, step, step.loss.init)
            assert extra == {"position": 2}
            assert tree.structure(state) == tree.structure(step.init(step.loss.init))
            fds.save(tmp_path / "other", state, step)
            return plain(state, step)

        assert_same_bits(in_order(joined(run(other, move))), in_order(want))

        def back():
            step = make(one)
            return fds.load(tmp_path / "other", step, step.loss.init)[0]

        assert_same_bits(run(one, back), states)  # padding included


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_training_goes_on_as_it_would_have(saves, name):
    topology = TOPOLOGIES[name]
    dir, states, _ = saves(name)

    def straight():
        step = make(topology)
        return train(step, states[0 if topology is None else fds.mesh(all=-1).rank], 2)

    def resumed():
        step = make(topology)
        return train(step, fds.load(dir, step, step.loss.init)[0], 2)

    assert_same_bits(run(topology, resumed), run(topology, straight))


@pytest.mark.parametrize("name", [name for name in TOPOLOGIES if name != "plain"])
def test_training_goes_on_on_another_topology_to_rounding(gone_on, name):
    """But for statistics, which data ranks average where one process adds up microbatches."""
    assert_rounding(gone_on(name), gone_on("plain"), additions=2 * 4096)


@pytest.fixture(scope="module")
def gone_on(saves):
    """Load one save on a topology, and train; a name gives the leaves of the plain state but buffers."""
    dir, *_ = saves("pp2 x dp2, stage 1")

    @functools.cache
    def after(name: str) -> dict:
        def body():
            step = make(TOPOLOGIES[name])
            state = train(step, fds.load(dir, step, step.loss.init)[0], 2)
            return {name: x for name, x in plain(state, step).items() if not name.startswith("buffers.")}

        return in_order(joined(run(TOPOLOGIES[name], body)))

    return after


def test_an_optimizer_of_whole_matrices_and_slots_that_some_stages_lack(tmp_path):
    mixed = lambda: fds.by_name({"2.linear.weight": fds.muon(0.1), "embed.*": fds.sgd(0.1), "*": fds.adamw(0.1)})
    names = ("pp3 x dp2, one without parameters", "pp2 x dp2, stage 3", "serial", "plain")
    _, want = saved(tmp_path, TOPOLOGIES[names[0]], 1, mixed(), fds.freeze("6.*"))
    assert "opt.momentum_buffer.2.linear.weight" in want and "opt.exp_avg.2.linear.bias" in want
    for name in names[1:]:
        topology = TOPOLOGIES[name]

        def move(topology=topology):
            step = make(topology, mixed(), fds.freeze("6.*"))
            return plain(fds.load(tmp_path, step, step.loss.init)[0], step)

        assert_same_bits(in_order(joined(run(topology, move))), in_order(want))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_exactly_one_rank_writes_each_element(saves, name):
    from safetensors.torch import load_file

    dir, _, want = saves(name)
    (folder,) = dir.glob("step*")
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    record = manifest.read_manifest(folder)
    step = make(None)
    names = {name: tuple(x.shape) for name, x in tree.paths(step.init(step.loss.init)).items()}
    assert {name: leaf.shape for name, leaf in record.leaves.items()} == names
    assert {name for file in files.values() for name in file} == names.keys() == want.keys()
    assert sum(x.numel() for file in files.values() for x in file.values()) == sum(x.numel() for x in want.values())
    for name, leaf in record.leaves.items():  # and what is in the files is the plain state, read without fds
        pieces = [files[chunk.file][name].view(-1) for chunk in leaf.chunks]
        assert torch.equal(bits(torch.cat(pieces).view(leaf.shape)), bits(want[name])), name


def test_replicas_share_the_load_and_second_owners_of_tied_layers_write_nothing(saves):
    (folder,) = saves("pp2 x dp2 x 2 copies")[0].glob("step*")
    leaves, places = manifest.read_manifest(folder).leaves, ({0, 1, 2, 3}, {4, 5, 6, 7})
    by_rank = lambda name: {int(chunk.file[4]) for chunk in leaves[name].chunks}
    assert all(by_rank(f"{slot}.embed.weight") <= places[0] for slot in ("params", "opt.exp_avg", "slots.ema"))
    assert len(by_rank("opt.exp_avg.embed.weight")) >= 2  # its slices are with two data ranks
    assert all(by_rank(name) <= places[0] for name in ("step", "calls", "key"))
    assert by_rank("params.5.linear.weight") <= places[1]
    written = set().union(*map(by_rank, leaves))
    assert written == {int(p.name[4]) for p in folder.glob("rank*")}
    assert all(written & {i, i + 1} for i in (0, 2, 4, 6))  # both copies at both places


@pytest.mark.parametrize("first", ["pp", "dp"])
def test_ranks_read_only_what_they_need_however_the_mesh_is_laid_out(tmp_path, monkeypatch, first):
    """Two stages without ties on two data ranks: a rank needs its own file, and step, calls and key."""
    loss = lambda: fds.Layers([nn.Linear(64, 64) for _ in range(2)], nn.MSELoss())

    def step_on():
        mesh = fds.mesh(**{"pp": 2, "dp": 2} if first == "pp" else {"dp": 2, "pp": 2})
        cut = fds.pipeline(plans.gpipe, mesh["pp"], num_microbatches=2, partition=[0, 1, 2])
        return fds.compose(cut, fds.shard_optimizer(mesh["dp"], stage=1), fds.adam(0.1))(loss())

    def save():
        step = step_on()
        fds.save(tmp_path, step.init(step.loss.init), step)
        return step.everyone.index

    read = set()
    plain_read = reader.Files.read

    def read_some(self, file, offset, out, checksum, where):
        read.add((fds.mesh(all=-1).rank, file, where.split(": ")[1]))
        plain_read(self, file, offset, out, checksum, where)

    own = [f"rank{index}.safetensors" for index in fds.simulate(save, 4)]
    assert sorted(own) == [f"rank{i}.safetensors" for i in range(4)]
    monkeypatch.setattr(reader.Files, "read", read_some)
    (folder,) = tmp_path.glob("step*")
    leaves = manifest.read_manifest(folder).leaves

    def load():
        step = step_on()
        fds.load(tmp_path, step, step.loss.init)

    fds.simulate(load, 4)
    shared = {"step", "calls", "key"}
    files = {name: leaves[name].chunks[0].file for name in shared}
    assert {one for one in read if one[2] in shared} == {(i, files[name], name) for i in range(4) for name in shared}
    assert {one[:2] for one in read if one[2] not in shared} == set(enumerate(own))


SMALL = TOPOLOGIES["pp2 x dp2, stage 1"]


def told(body, topology: Stages = SMALL) -> StorageError:
    """Return what the ranks raise; it is the same text on all."""

    def caught():
        with pytest.raises(StorageError) as error:
            body()
        return error.value

    errors = topology.run(caught)
    assert len({str(e) for e in errors}) == 1, errors
    return errors[0]


def load(dir, topology: Stages = SMALL, *more, loss=None):
    step = make(topology, *more, loss=loss)
    return fds.load(dir, step, step.loss.init)


@pytest.mark.parametrize("name", ["plain", "pp3, tied at both ends", "pp2 x dp2, stage 3"])
def test_a_save_of_another_model_is_refused_on_every_rank_with_the_leaf(saves, name):
    dir, *_ = saves(name)
    error = told(lambda: load(dir, loss=layers(8)))
    assert error.what == "rank 0: this is a save of another model: params.embed.weight"
    assert (error.got, error.want) == ("float32 (7, 6) in the save", "float32 (7, 8), as this step has it")
    longer = fds.Layers([*layers().layers, fds.LayerSpec(nn.Linear, 7, 7)], token_mean)
    error = told(lambda: load(dir, loss=longer))  # only the last stage knows of it
    assert error.what == "rank 0: this save has other parameters: params.8.weight"
    assert (error.got, error.want) == ("nothing in the save", "float32 (7, 7), as this step has it")
    shorter = fds.Layers([*layers().layers[:5], torch.tanh, *layers().layers[6:]], token_mean)
    error = told(lambda: load(dir, loss=shorter))
    assert error.what == "rank 0: this save has other parameters: params.5.norm.weight"
    assert error.got == "float32 (6,) in the save" and error.want == "nothing, as this step has it"


def test_a_save_of_another_composition_is_refused_on_every_rank(saves):
    dir, *_ = saves("pp2 x dp2, stage 1")
    error = told(lambda: load(dir, SMALL, fds.sgd(0.1), fds.ema(0.9), fds.loss_scale(2.0**5)))
    assert error.what == "rank 0: this save is of another composition: opt.exp_avg.embed.weight"
    error = told(lambda: load(dir, SMALL, fds.adam(0.1), fds.loss_scale()))
    assert error.what == "rank 0: this save is of another composition: slots.ema.embed.weight"


@pytest.mark.parametrize("leaf", ["params.embed.weight", "params.5.norm.bias", "buffers.3.running_var", "key"])
def test_a_leaf_that_is_missing_from_the_save_is_named_on_every_rank(tmp_path, leaf):
    saved(tmp_path, SMALL)
    (folder,) = tmp_path.glob("step*")
    rewrite(folder, lambda record: record["leaves"].pop(leaf) and None)
    error = told(lambda: load(tmp_path))
    assert error.what.startswith("rank 0: ") and error.what.endswith(f": {leaf}")
    assert error.got == "nothing in the save"


def after(topology: Stages = SMALL, calls: int = 1, **changed):
    """Return step and state on a rank, the state with fields changed."""
    step = make(topology)
    return step, attrs.evolve(train(step, step.init(step.loss.init), calls), **changed)


def test_ranks_of_one_place_that_hold_other_leaves(tmp_path):
    def save():
        step, state = after()
        if step.everyone.index == 3:
            state = attrs.evolve(state, slots={**state.slots, "x": torch.ones(1)})
            more = Memory("x", lambda params, device: torch.ones(1, device=device), "parameters")
            step = attrs.evolve(step, memory={**step.memory, "x": more})
        fds.save(tmp_path, state, step)

    error = told(save)
    assert error.what == "the ranks do not agree on the leaves of the ranks at place 1"
    assert error.where == "rank 3" and error.want.endswith("as rank 2 has it") and not os.listdir(tmp_path)


def test_a_rank_that_would_load_less_than_others_of_its_place(saves):
    dir, *_ = saves("pp2 x dp2, stage 1")

    def load_less():
        step = make(SMALL)
        if fds.mesh(all=-1).rank == 3:
            less = {name: one for name, one in step.memory.items() if name != "ema"}
            step = attrs.evolve(step, memory=less, after=())
        fds.load(dir, step, step.loss.init)

    error = told(load_less)
    assert error.what == "the ranks do not agree on the leaves of the ranks at place 1"
    assert error.where == "rank 3" and error.want.endswith("as rank 2 has it")


@pytest.mark.parametrize("name", ["pp2", "pp2 x dp2, stage 0", "pp2 x dp2, stage 1"])
def test_what_all_stages_have_they_have_in_one_shape(tmp_path, name):
    topology = TOPOLOGIES[name]

    def count(params, device):
        return torch.zeros(1 + fds.mesh(pp=2, dp=-1)["pp"].index, device=device)

    def save(dir, slot):
        step = attrs.evolve(make(topology), memory={"mine": Memory("mine", slot, "parameters")})
        fds.save(dir, step.init(step.loss.init), step)

    error = told(lambda: save(tmp_path / "bad", count), topology)
    assert error.what == "the ranks do not agree on the leaf slots.mine"
    assert (error.got, error.want) == ("float32 (2,)", "float32 (1,), as rank 0 has it")
    assert not (tmp_path / "bad").exists()
    topology.run(lambda: save(tmp_path / "good", lambda params, device: torch.arange(3.0, device=device)))
    (folder,) = (tmp_path / "good").glob("step*")
    (chunk,) = manifest.read_manifest(folder).leaves["slots.mine"].chunks
    assert chunk.file in {f"rank{i}.safetensors" for i in range(topology.data)} and chunk.length == 3

    def load_bad():
        step = attrs.evolve(make(topology), memory={"mine": Memory("mine", count, "parameters")})
        fds.load(tmp_path / "good", step, step.loss.init)

    assert told(load_bad, topology).what == "the ranks do not agree on the leaf slots.mine"


def test_a_state_of_other_stages_is_refused_where_slices_show_it(tmp_path):
    other = attrs.evolve(SMALL, partition=[0, 4, 8])  # of the layers with buffers every rank has the same

    def save():
        _, state = after(other)
        fds.save(tmp_path, state, make(attrs.evolve(SMALL, partition=[0, 6, 8])))

    error = told(save)
    assert error.what.endswith("these parameters are sharded in another way") and not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("which", "error"),
    [(which, (OSError(28, "No space left on device"), ValueError("odd"))[which % 2]) for which in range(4)],
    ids=["disk-0", "bug-1", "disk-2", "bug-3"],
)
def test_a_rank_that_fails_while_writing_is_an_error_on_all_and_the_save_before_it_stays(
    tmp_path, monkeypatch, which, error
):
    _, want = saved(tmp_path, SMALL, 1)
    plain_write, turn = writer.write, f"rank{which}.safetensors"

    def write(path, header, spans):
        if path.endswith(turn):
            plain_write(path, header, spans[:1])  # something is there already
            raise error
        return plain_write(path, header, spans)

    monkeypatch.setattr(writer, "write", write)

    def save():
        step, state = after(calls=2)
        fds.save(tmp_path, state, step)

    got = told(save)
    assert got.what.startswith(f"rank {which}: ") and str(error.args[-1]) in f"{got.what} {got.got}"
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "latest", "step00000001"]

    def back():
        step = make(SMALL)
        return plain(fds.load(tmp_path, step, step.loss.init)[0], step)

    assert_same_bits(in_order(joined(SMALL.run(back))), in_order(want))


def test_a_byte_that_flipped_is_an_error_on_all_ranks(tmp_path):
    saved(tmp_path, SMALL)
    (folder,) = tmp_path.glob("step*")
    for path in sorted(folder.glob("rank*.safetensors")):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert "a tensor file was changed after it was written" in told(lambda: load(tmp_path)).what
        path.unlink()
        assert "a tensor file is missing" in told(lambda: load(tmp_path)).what
        path.write_bytes(whole)
    load(tmp_path, TOPOLOGIES["plain"])


def on_gloo(dir, name):
    """Train and save, load and go on; return the plain leaves before and after, and whether going on was exact."""
    topology = TOPOLOGIES[name]
    step = make(topology)
    state = train(step, step.init(step.loss.init, key=3), 2)
    fds.save(dir, state, step)
    loaded, _ = fds.load(dir, step, step.loss.init)
    assert_same_bits(loaded, state)
    assert_same_bits(train(step, loaded, 1), train(step, state, 1))
    return plain(state, step)


def load_on_gloo(dir, name):
    step = make(TOPOLOGIES[name])
    return plain(fds.load(dir, step, step.loss.init)[0], step)


def test_four_processes_save_and_others_load(tmp_path):
    want = in_order(joined(ranks.run(on_gloo, str(tmp_path), "pp2 x dp2, stage 2", world_size=4)))
    assert_same_bits(in_order(joined(ranks.run(load_on_gloo, str(tmp_path), "zb_v"))), want)
    assert_same_bits(in_order(load_on_gloo(tmp_path, "plain")), want)
    states, _ = saved(tmp_path / "simulated", TOPOLOGIES["pp2 x dp2, stage 2"])
    assert len(states) == 4
    (folder,) = (tmp_path / "simulated").glob("step*")
    read = manifest.read_manifest
    real, simulated = (read(f).leaves for f in (tmp_path / folder.name, folder))
    assert real == simulated  # checksums too
