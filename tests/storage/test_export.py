"""What is exported is what the state holds, cast, under the module's names; and there whole or not at all."""

import builtins
import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
from unittest import mock

import attrs
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import nn

import fds
from fds import plans, tree
from fds.errors import DonatedStateError, StorageError
from fds.storage import exporting
from fds.storage.exporting import export_weights
from fds.storage.format.manifest import Chunk, SavedLeaf
from fds.storage.format.tensors import CODES, DTYPES
from fds.storage.source import spans
from tests.bits import assert_same_bits
from tests.laws.problems import Block, language, token_mean
from tests.storage.states import Template, small_state, state_of
from tests.storage.topologies import Stages, Topology, plain

FLOATS = [dtype for dtype in CODES if dtype.is_floating_point]
INDEX = "model.safetensors.index.json"


def module():
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))


def trained(*transforms, calls=2):
    """Return a module's step with averages, and a state that it has reached."""
    apply, params, buffers = fds.functional(module())

    def loss(params, batch, buffers):
        out, buffers = apply.with_buffers(params, buffers, batch)
        return out.square().mean(), {}, buffers

    step = fds.compose(*transforms, fds.adamw(0.1), fds.ema(0.9))(fds.with_buffers(loss, buffers))
    state = step.init(params)
    for _ in range(calls):
        state, _ = step(state, torch.randn(8, 6))
    return step, state


def weights(state, params=None, dtype=None):
    """Return what a file should hold."""
    named = {**tree.paths(state.params if params is None else params), **state.buffers}
    return {name: x if dtype is None or not x.is_floating_point() else x.to(dtype) for name, x in named.items()}


def loaded(paths):
    """Return the tensors of exported files; the index, if there is one, says where each is."""
    found = {path.name: load_file(path) for path in paths if path.name != INDEX}
    if paths[-1].name == INDEX:
        index = json.loads(paths[-1].read_text())
        assert index["weight_map"] == {name: file for file, held in found.items() for name in held}
        total = sum(x.numel() * x.element_size() for held in found.values() for x in held.values())
        assert index["metadata"] == {"total_size": total}
    return {name: x for held in found.values() for name, x in held.items()}


def assert_weights(paths, want):
    found = loaded(paths)
    assert found.keys() == want.keys()
    assert_same_bits(found, {name: want[name] for name in found})


@pytest.mark.parametrize("dtype", [None, *FLOATS], ids=str)
def test_weights_and_buffers_are_exported_in_any_dtype(tmp_path, dtype):
    step, state = trained()
    fds.save(tmp_path / "run", state, step)
    want = weights(state, dtype=dtype)
    assert want["1.num_batches_tracked"].dtype is torch.int64  # only floating leaves are cast
    assert_weights(export_weights(tmp_path / "run", tmp_path / "a.safetensors", dtype), want)
    assert_weights(export_weights(state, tmp_path / "b.safetensors", dtype), want)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_the_module_takes_what_was_exported(tmp_path):
    step, state = trained()
    fds.save(tmp_path / "run", state, step)
    other = module()
    (path,) = export_weights(tmp_path / "run", tmp_path / "hf", torch.float32)
    assert path == tmp_path / "hf" / "model.safetensors"
    other.load_state_dict(load_file(path), strict=True)
    assert_same_bits(dict(other.state_dict()), {name: weights(state)[name] for name in other.state_dict()})


def test_averages_take_the_place_of_the_parameters(tmp_path):
    step, state = trained()
    fds.save(tmp_path / "run", state, step)
    want = weights(state, state.slots["ema"], torch.bfloat16)
    for source in (state, tmp_path / "run"):
        assert_weights(export_weights(source, tmp_path / "ema.safetensors", tree="slots.ema"), want)


def test_a_save_is_exported_by_its_tag(tmp_path):
    step, state = trained()
    fds.save(tmp_path, state, step)
    fds.save(tmp_path, step(state, torch.randn(8, 6))[0], step)
    assert_weights(export_weights(str(tmp_path), f"{tmp_path}/x.safetensors", None, tag="step00000002"), weights(state))


def test_every_dtype_is_exported_as_it_is(tmp_path):
    patterns = torch.arange(256, dtype=torch.uint8)
    params = {name: (patterns & 1 if dtype is torch.bool else patterns).view(dtype) for name, dtype in DTYPES.items()}
    params |= {"scalar": torch.tensor(3.0), "empty": torch.ones(0, 2), "strided": torch.arange(12.0).view(3, 4).T}
    params["conj"] = torch.tensor([1 + 2j], dtype=torch.complex64).conj()
    state = state_of(params)
    fds.save(tmp_path / "run", state, Template(state))
    for source in (state, tmp_path / "run"):
        assert_weights(export_weights(source, tmp_path / "x.safetensors", None), {**params, "conj": params["conj"] + 0})


TOPOLOGIES = {
    "stage 0": Topology(2, 0),
    "stage 1": Topology(3, 1, 300),
    "stage 2": Topology(2, 2),
    "stage 3, replicas": Topology(4, 3, 300, replicas=2, persist_below=8),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=str)
def test_ranks_write_their_slices_of_the_files_that_a_save_would_give(tmp_path, name, dtype):
    topology = TOPOLOGIES[name]

    def body():
        step, state = trained(topology.shard())
        more = {"step": step, "max_shard_bytes": 300}
        paths = export_weights(state, tmp_path / "ranks", dtype, **more)
        averages = export_weights(state, tmp_path / "ema.safetensors", dtype, step=step, tree="slots.ema")
        fds.save(tmp_path / "run", state, step)
        return paths, averages, plain(state, step)

    found = topology.run(body)
    assert len({tuple(paths) for paths, _, _ in found}) == 1
    paths, averages, leaves = found[0]
    alone = export_weights(tmp_path / "run", tmp_path / "alone", dtype, max_shard_bytes=300)
    assert [p.name for p in alone] == [p.name for p in paths] and len(paths) > 2
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(alone, paths, strict=True))
    cast = lambda x: x if dtype is None or not x.is_floating_point() else x.to(dtype)
    want = {n.partition(".")[2]: cast(x) for n, x in leaves.items() if n.split(".")[0] in ("params", "buffers")}
    assert_weights(paths, want)
    of_slot = {n.removeprefix("slots.ema."): cast(x) for n, x in leaves.items() if n.startswith("slots.ema.")}
    assert_weights(averages, {**want, **of_slot})


def layers():
    logits = lambda embed, x: torch.nn.functional.linear(x, embed.weight)
    return fds.Layers(
        [
            fds.TiedLayerSpec("embed", nn.Embedding, 7, 6),
            torch.tanh,
            fds.LayerSpec(Block, 6, 0.1),
            fds.LayerSpec(nn.BatchNorm1d, 4),
            fds.LayerSpec(Block, 6, 0.1),
            fds.TiedLayerSpec("embed", nn.Embedding, 7, 6, forward_fn=logits),
        ],
        token_mean,
    )


STAGES = {
    "pp2": Stages(2),
    "pp3": Stages(3, plans.zb_h1),
    "pp2 x dp2": Stages(2, plans.one_f_one_b, 2, 1),
    "pp2 x dp2, stage 3": Stages(2, plans.gpipe, 2, 3),
}


@pytest.mark.parametrize("stages", STAGES.values(), ids=STAGES)
def test_stages_of_a_pipeline_write_theirs(tmp_path, stages):
    def body():
        step = fds.compose(*stages.transforms(), fds.sgd(0.1))(layers())
        state = step.init(step.loss.init)
        state, _ = step(state, language(0))
        fds.save(tmp_path / "run", state, step)
        return export_weights(state, tmp_path / "ranks.safetensors", step=step), plain(state, step)

    found = stages.run(body)
    want = {name: x for _, leaves in found for name, x in leaves.items() if name.split(".")[0] in ("params", "buffers")}
    as_read = {n.partition(".")[2]: x.bfloat16() if x.is_floating_point() else x for n, x in want.items()}
    assert_weights(found[0][0], as_read)
    alone = export_weights(tmp_path / "run", tmp_path / "alone.safetensors")
    assert_same_bits(dict(sorted(loaded(alone).items())), dict(sorted(as_read.items())))


def test_nothing_is_written_twice(tmp_path):
    written = []
    pwrite = os.pwrite
    counted = lambda fd, data, offset: written.append((offset, len(data))) or pwrite(fd, data, offset)

    def body():
        step, state = trained(Topology(4, 1, 300, replicas=2).shard())
        with mock.patch.object(exporting.os, "pwrite", counted):
            return export_weights(state, tmp_path / "x.safetensors", None, step=step)

    (path,) = fds.simulate(body, 4)[0]
    edges = sorted(written)
    assert edges[0][0] == 4096 and sum(edges[-1]) == path.stat().st_size
    assert all(start + length == after for (start, length), (after, _) in itertools.pairwise(edges))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 100))
def test_files_are_as_large_as_they_may_be(tmp_path_factory, sizes, most):
    params = {f"{i}.weight": torch.full((n,), i, dtype=torch.uint8) for i, n in enumerate(sizes)}
    dir = tmp_path_factory.mktemp("hf")
    paths = export_weights(state_of(params), dir, max_shard_bytes=most)
    assert_weights(paths, params)
    files = [path for path in paths if path.name != INDEX]
    held = [[x.numel() for x in load_file(path).values()] for path in files]
    assert all(sum(one) <= most or len([n for n in one if n]) == 1 for one in held)
    assert all(sum(a) + b[0] > most for a, b in itertools.pairwise(held))
    names = (
        ["model.safetensors"]
        if len(files) == 1
        else [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    )
    assert [path.name for path in files] == names and sorted(os.listdir(dir)) == sorted(p.name for p in paths)


def test_no_more_than_a_block_is_read_at_once(tmp_path, monkeypatch):
    state = state_of({"x": torch.randn(5_000_001), "y": torch.ones(3, dtype=torch.bfloat16)})
    fds.save(tmp_path / "run", state, Template(state))
    read = []
    plain_open = exporting.open_source

    def watched(*args):
        source = plain_open(*args)
        look = lambda name, start, out: read.append(out.numel() * out.element_size()) or source.read(name, start, out)
        return attrs.evolve(source, read=look)

    monkeypatch.setattr(exporting, "open_source", watched)
    assert_weights(export_weights(tmp_path / "run", tmp_path / "x.safetensors", None), weights(state))
    assert sum(read) == 20_000_004 + 6 and max(read) <= 8 * 2**20


@given(
    st.integers(0, 5_000_000).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.tuples(st.integers(0, n), st.integers(1, 3_000_000)), max_size=4))
    )
)
def test_pieces_tile_a_leaf_of_chunks_and_gaps(drawn):
    numel, places = drawn
    inside = sorted((start, min(length, numel - start)) for start, length in places if start < numel)
    chunks = tuple(Chunk("a.safetensors", 0, start, length, "") for start, length in inside)
    end = 0
    for start, length in spans(SavedLeaf("float32", (numel,), chunks)):
        assert start == end and length > 0
        end += length
    assert end == numel


def test_files_in_a_directory_are_replaced_and_others_stay(tmp_path):
    _, state = trained()
    (tmp_path / "config.json").write_text("{}")
    many = export_weights(state, tmp_path, max_shard_bytes=200)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", *(p.name for p in many)}
    (one,) = export_weights(state, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert oct(one.stat().st_mode & 0o777) == oct((tmp_path / "config.json").stat().st_mode & 0o777)
    assert export_weights(state, tmp_path, max_shard_bytes=200) == many
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", *(p.name for p in many)}
    export_weights(state, tmp_path / "new" / "folder" / "x.safetensors")
    export_weights(state, tmp_path / "best.safetensors")  # which is none of a model's files
    assert len(list(tmp_path.glob("model*"))) == len(many)


REQUESTS = [(os, name) for name in ("mkdir", "rename", "link", "fsync", "open", "pwrite")] + [(builtins, "open")]


@contextlib.contextmanager
def failing(n, act):
    """Call `act()` in place of request number `n` to the file system, counted from 0; give the requests made."""
    made = []

    def counted(call, name):
        def request(*args, **kwargs):
            made.append(name)
            if len(made) == n + 1:
                act()
            return call(*args, **kwargs)

        return request

    with contextlib.ExitStack() as patched:
        for where, name in REQUESTS:
            patched.enter_context(mock.patch.object(where, name, counted(getattr(where, name), name)))
        yield made


def broken():
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("target", ["one.safetensors", "one", "many", "new", "new/x.safetensors"])
def test_an_error_at_any_request_leaves_what_was_there(tmp_path, target):
    path, (_, state) = tmp_path / target, trained(calls=1)
    old = attrs.evolve(state, params=tree.map(torch.zeros_like, state.params))
    export = lambda it: export_weights(it, path, max_shard_bytes=10**9 if target == "one" else 500)
    if not target.startswith("new"):
        export(old)
    found = lambda: {p: p.is_file() and p.read_bytes() for p in tmp_path.rglob("*")}
    before, n, made = found(), 0, [""]
    while n <= len(made):
        with failing(n, broken) as made:
            try:
                export(state)
                refused = False
            except StorageError as error:
                assert error.what == "the file system refuses this export" and error.got == os.strerror(errno.EIO)
                refused = True
        if not refused:
            # a directory that is there need not be made; where there are no links the old file moves away; and
            # what it replaced may stay hidden for a while
            published = len(made) - made[::-1].index("fsync")
            assert n >= published or made[n] in ("mkdir", "link")
            assert_weights(export(state), weights(state, dtype=torch.bfloat16))
            if target.startswith("new"):
                shutil.rmtree(tmp_path / "new")
            else:
                export(old)
        assert found() == before, made
        n += 1
    assert n > 8


def killed(export, n) -> bool:
    """Export in a process that is killed at request number `n`; say whether it came so far."""
    pid = os.fork()
    if pid == 0:
        try:
            with failing(n, lambda: os._exit(9)):
                export()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1] != 0


@pytest.mark.parametrize(
    ("before", "after"), [("one.safetensors",) * 2, (None, "many"), ("many", "one"), ("many", "many"), ("one", "many")]
)
def test_killed_at_any_request_nobody_finds_half_an_export(tmp_path, before, after):
    _, state = trained(calls=1)
    old = attrs.evolve(state, params=tree.map(torch.zeros_like, state.params))
    file = tmp_path / "x.safetensors" if after == "one.safetensors" else tmp_path
    export = lambda it, kind: export_weights(it, file, None, max_shard_bytes=1000 if kind == "many" else 10**9)
    n, came = 0, True
    while came:
        if before is not None:
            export(old, before)
        came = killed(lambda: export(state, after), n)
        if file != tmp_path or (tmp_path / "model.safetensors").exists():
            found = load_file(file if file != tmp_path else file / "model.safetensors")
        elif (tmp_path / INDEX).exists():
            files = set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values())
            found = {name: x for one in files for name, x in load_file(tmp_path / one).items()}
        else:
            assert before is None or "many" in (before, after)  # a loader says that there is no model
            found = {}
        assert not found or any(same(found, weights(it)) for it in (old, state))
        paths = export(state, after)
        assert_weights(paths, weights(state))
        assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in paths)
        n += 1
    assert n > 10


def same(found, want):
    return found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


def test_a_rank_that_cannot_write_is_an_error_on_all(tmp_path):
    pwrite = os.pwrite

    def full(fd, data, offset):
        if fds.mesh(dp=-1).rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    def body():
        step, state = trained(Topology(2, 1).shard())
        with pytest.raises(StorageError) as caught:
            export_weights(state, tmp_path / "x" / "y.safetensors", step=step)
        return str(caught.value)

    with mock.patch.object(exporting.os, "pwrite", full):
        errors = fds.simulate(body, 2)
    assert len(set(errors)) == 1 and errors[0].startswith("rank 1: the file system refuses this export")
    assert "No space left on device" in errors[0] and not os.listdir(tmp_path)


def test_ranks_that_export_different_things(tmp_path):
    def body():
        step, state = trained(Topology(2, 1).shard())
        with pytest.raises(StorageError, match="the ranks do not agree on the path"):
            export_weights(state, tmp_path / f"{fds.mesh(dp=-1).rank}.safetensors", step=step)
        dtype = [torch.float16, None][fds.mesh(dp=-1).rank]
        with pytest.raises(StorageError, match="the ranks do not agree on the dtype"):
            export_weights(state, tmp_path / "x.safetensors", dtype, step=step)

    fds.simulate(body, 2)
    assert not os.listdir(tmp_path)


def test_what_a_killed_export_left_is_cleared_and_a_running_one_is_refused(tmp_path):
    _, state = trained()
    hidden = tmp_path / ".model.exporting"
    hidden.mkdir()
    (hidden / "model.safetensors").write_bytes(b"half")
    holder = os.open(hidden, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.raises(StorageError, match="another export is writing here"):
        export_weights(state, tmp_path)
    assert (hidden / "model.safetensors").read_bytes() == b"half"
    os.close(holder)
    export_weights(state, tmp_path)
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_changed_byte_is_not_exported(tmp_path):
    step, state = trained()
    folder = fds.save(tmp_path / "run", state, step)
    data = bytearray((folder / "rank0.safetensors").read_bytes())
    at = data.index(bytes(state.params["0.weight"].numpy().tobytes()[:8]))
    data[at] ^= 1
    (folder / "rank0.safetensors").write_bytes(data)
    (tmp_path / "x.safetensors").write_bytes(b"before")
    with pytest.raises(StorageError, match="a tensor file was changed"):
        export_weights(tmp_path / "run", tmp_path / "x.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["run", "x.safetensors"]
    assert (tmp_path / "x.safetensors").read_bytes() == b"before"


def told(*args, **kwargs) -> StorageError:
    with pytest.raises(StorageError) as caught:
        export_weights(*args, **kwargs)
    return caught.value


def test_what_is_refused(tmp_path):
    step, state = trained(fds.donate())
    path = tmp_path / "x.safetensors"
    assert told(state, path, torch.int8).what == "weights cannot be cast to this"
    assert told(state, path, "bfloat16").got == "'bfloat16'"
    assert told(state, path, max_shard_bytes=0).what == "not a size of a file"
    assert told(state, path, tag="best").what == "a state has no tags"
    assert told(tmp_path, path, step=step).where == "export_weights"
    assert told(tmp_path, path).what == "there is no save here"
    error = told(state, path, tree="slots.eam")
    assert error.what == "there is nothing to export here" and error.hint == "did you mean 'slots.ema'?"
    error = told(state, path, tree="opt")
    assert error.what == "this tree does not match the parameters" and error.where == "opt.0.weight"
    assert (error.got, error.want) == ("nothing", "(40, 6)")
    (tmp_path / "dir.safetensors").mkdir()
    assert told(state, tmp_path / "dir.safetensors").what == "what exists under the name of a file is not a file"
    (tmp_path / "file").write_bytes(b"")
    assert told(state, tmp_path / "file").what == "the file system refuses this export"
    both = attrs.evolve(state, buffers={"0.weight": torch.ones(1)})
    assert told(both, path).what == "a parameter and a buffer have the same name"
    assert told(state_of({"__metadata__": torch.ones(1)}), path).where == "__metadata__"
    assert told(state_of({"x": torch.ones(1, device="meta")}), path).what == "a leaf of the state has no data"
    step(state, torch.randn(8, 6))
    with pytest.raises(DonatedStateError):
        export_weights(state, path)
    assert sorted(os.listdir(tmp_path)) == ["dir.safetensors", "file"]


def test_a_part_of_a_state_is_refused_without_its_step(tmp_path):
    def body():
        _, state = trained(Topology(2, 1).shard())
        _, alone = trained()
        errors = [told(one, tmp_path / "x.safetensors") for one in (state, alone)]
        other, _ = trained(Topology(2, 0).shard())
        errors.append(told(state, tmp_path / "x.safetensors", step=other))
        return [error.what for error in errors]

    for one, two, three in fds.simulate(body, 2):
        assert one == two == "a rank may hold a part of the state, which only the step knows"
        assert three == "rank 0: these parameters are sharded in another way"
    assert not os.listdir(tmp_path)


@pytest.mark.peers
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
@pytest.mark.parametrize("ranks", [0, 2])
def test_transformers_loads_what_was_exported(tmp_path, kind, ranks):
    import transformers

    sizes = {
        "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 12},
        "Llama": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 50,
            "intermediate_size": 24,
            "max_position_embeddings": 12,
        },
    }[kind]
    config = getattr(transformers, f"{kind}Config")(**sizes, use_cache=False)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[kind])(config).eval()
    apply, params, _ = fds.functional(model)
    tokens = torch.arange(20).view(2, 10)
    config.save_pretrained(tmp_path)

    def body():
        shard = [Topology(ranks, 3, 4096).shard()] if ranks else []
        step = fds.compose(*shard, fds.adamw(0.01))(lambda p, x: apply(p, input_ids=x, labels=x).loss)
        state, _ = step(step.init(params), tokens)
        export_weights(state, tmp_path, torch.float32, step=step, max_shard_bytes=10_000)
        return step.params(state)

    after = fds.simulate(body, ranks)[0] if ranks else body()
    assert (tmp_path / INDEX).exists()
    found, said = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(said.get(what) for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    want = apply(after, input_ids=tokens).logits
    assert torch.equal(found.eval()(input_ids=tokens).logits, want)


def test_nothing_is_exported_into_the_folder_of_a_save(tmp_path):
    state = small_state(1)
    folder = fds.save(tmp_path / "run", state, Template(state))
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for path in (folder, folder / "rank0.safetensors", folder / "other.safetensors"):
        with pytest.raises(StorageError, match="the folder of a save"):
            fds.export_weights(tmp_path / "run", path)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
