"""Weights of files that others wrote: safetensors, torch.save, shards of both."""

import json
import os
import resource
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fds
from fds import tree
from fds.errors import StorageError
from fds.step import fill, transform
from fds.storage import loading
from fds.storage.disk.writer import BLOCK
from fds.storage.foreign import weights
from fds.storage.format.tensors import CODES
from tests.bits import assert_same_bits, bits
from tests.storage.foreign.reading import read, read_all


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(5, 7),
        "a.bias": torch.randn(5).bfloat16(),
        "half": torch.randn(2, 3, 4).half(),
        "count": torch.tensor(3),
        "none": torch.zeros(0, 4),
        "mask": torch.tensor([True, False]),
    }


def single(path: Path) -> dict[str, torch.Tensor]:
    save_file(tensors(), path)
    return tensors()


def in_torch(path: Path) -> dict[str, torch.Tensor]:
    torch.save(tensors(), path)
    return tensors()


def sharded(folder: Path, ending: str, write) -> dict[str, torch.Tensor]:
    folder.mkdir()
    names, table = sorted(tensors()), {}
    for i in range(2):
        part = {name: tensors()[name] for name in names[i::2]}
        write(part, folder / f"model-{i}{ending}")
        table |= dict.fromkeys(part, f"model-{i}{ending}")
    kind = {".safetensors": "model.safetensors", ".bin": "pytorch_model.bin"}[ending]
    (folder / f"{kind}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": table}))
    return tensors()


def assert_holds(source, want: dict[str, torch.Tensor], piece: int | None = None) -> None:
    have = read_all(source, piece)
    assert have.keys() == {f"params.{name}" for name in want}
    for name, x in want.items():
        assert have[f"params.{name}"].dtype == x.dtype
        assert torch.equal(bits(have[f"params.{name}"]), bits(x)), name


@pytest.mark.parametrize("piece", [None, 1, 3])
def test_a_safetensors_file_is_read(tmp_path, piece):
    assert_holds(weights(tmp_path / "x.safetensors") if single(tmp_path / "x.safetensors") else None, tensors(), piece)


@pytest.mark.parametrize("piece", [None, 1, 3])
@pytest.mark.parametrize("ending", [".bin", ".pt", ".pth"])
def test_a_state_dict_of_torch_is_read(tmp_path, ending, piece):
    in_torch(tmp_path / f"x{ending}")
    assert_holds(weights(tmp_path / f"x{ending}"), tensors(), piece)


@pytest.mark.parametrize(("ending", "write"), [(".safetensors", save_file), (".bin", torch.save)])
def test_shards_are_read_by_their_index_or_their_directory(tmp_path, ending, write):
    want = sharded(tmp_path / "model", ending, write)
    assert_holds(weights(tmp_path / "model"), want)
    assert_holds(weights(next((tmp_path / "model").glob("*.index.json"))), want)


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors", "pytorch_model.bin", "x.pt"])
def test_a_directory_with_one_file_is_read(tmp_path, name):
    (single if name.endswith("safetensors") else in_torch)(tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    assert_holds(weights(tmp_path), tensors())


def test_safetensors_come_before_what_stands_beside_them(tmp_path):
    single(tmp_path / "model.safetensors")
    torch.save({"other": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert_holds(weights(tmp_path), tensors())


@pytest.mark.parametrize("dtype", CODES)
def test_every_dtype_is_read(tmp_path, dtype):
    x = torch.arange(6).to(torch.uint8).view(torch.uint8).repeat_interleave(dtype.itemsize).view(dtype)
    x = torch.tensor([True, False] * 3) if dtype == torch.bool else x
    save_file({"x": x}, tmp_path / "x.safetensors")
    torch.save({"x": x}, tmp_path / "x.pt")
    for name in ("x.safetensors", "x.pt"):
        have = read(weights(tmp_path / name), "params.x", 4)
        assert have.dtype == dtype and torch.equal(have.view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("key", ["state_dict", "model", "module"])
def test_a_state_dict_alone_under_its_name_is_found(tmp_path, key):
    torch.save({key: tensors(), "epoch": 3, "optimizer_states": [{"state": {}}]}, tmp_path / "x.pt")
    assert_holds(weights(tmp_path / "x.pt"), tensors())


def test_the_module_in_a_file_of_deepspeed_is_found(golden):
    have = read_all(weights(next((golden / "zero1_ranks2").glob("*/mp_rank_00*"))))
    assert have["params.head.weight"].shape == (3, 5)
    with pytest.raises(StorageError, match="without the weights"):
        weights(next((golden / "zero3_ranks2").glob("*/zero_pp_rank_0*model*")))


def test_parameters_of_a_module_are_read(tmp_path):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    torch.save(module.state_dict(), tmp_path / "x.pt")
    assert_holds(weights(tmp_path / "x.pt"), module.state_dict())
    torch.save(dict(module.named_parameters()), tmp_path / "y.pt")
    assert_holds(weights(tmp_path / "y.pt"), {n: p.detach() for n, p in module.named_parameters()})


def test_tensors_that_share_storage_are_leaves_of_equal_data(tmp_path):
    x = torch.randn(3, 4)
    torch.save({"a": x, "b": x, "part": x[1:]}, tmp_path / "x.pt")
    source = weights(tmp_path / "x.pt")
    assert_holds(source, {"a": x, "b": x, "part": x[1:]})
    assert {name.removeprefix("params."): first for name, first in source.aliases.items()} == {
        "a": "params.a",
        "b": "params.a",
        "part": "params.part",
    }


@pytest.mark.parametrize("rename", [None, {"head.weight": "embed.weight", "embed.weight": "head.weight"}])
def test_a_state_dict_of_tied_parameters_fits_parameters_that_have_one_of_the_names(tmp_path, rename):
    embed, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    torch.save(nn.ModuleDict({"embed": embed, "head": head}).state_dict(), tmp_path / "x.pt")
    step = fds.compose(fds.sgd(0.1))(lambda params, batch: params["embed.weight"].sum() * batch)
    state = fds.import_weights(tmp_path / "x.pt", step, {"embed.weight": torch.zeros(5, 3)}, rename=rename)
    assert torch.equal(state.params["embed.weight"], embed.weight)
    torch.save({"embed.weight": embed.weight, "head.weight": embed.weight.clone()}, tmp_path / "y.pt")
    with pytest.raises(StorageError, match=r"other parameters: params\.(head|embed)\.weight"):
        fds.import_weights(tmp_path / "y.pt", step, {"embed.weight": torch.zeros(5, 3)}, rename=rename)


def test_a_tensor_of_more_than_a_block_is_converted_whole(tmp_path):
    x = torch.randn(BLOCK // 4 + 5)
    save_file({"w": x}, tmp_path / "x.safetensors")
    step = fds.compose(fds.sgd(0.1))(lambda params, batch: params["w"].sum())
    wide = {"w": torch.zeros(len(x), dtype=torch.float64)}
    state = fds.import_weights(tmp_path / "x.safetensors", step, wide)
    assert torch.equal(state.params["w"], x.double())


@pytest.mark.parametrize("piece", [None, 1, 2, 5, 7, 11])
def test_tensors_that_lie_otherwise_than_in_order_are_read_in_order(tmp_path, piece):
    x = torch.arange(60.0).view(3, 4, 5)
    views = {
        "turned": x.permute(2, 0, 1),
        "skipping": x[:, ::2, 1::2],
        "repeated": x[0, 0].expand(4, 5),
        "column": x[:, 1, 2],
        "scalar": x[1, 2, 3],
        "folded": x[:1].transpose(0, 2),
    }
    torch.save(views, tmp_path / "x.pt")
    source = weights(tmp_path / "x.pt")
    for name, want in views.items():
        assert torch.equal(read(source, f"params.{name}", piece), want), name


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
def test_opening_and_reading_a_slice_takes_no_memory_for_the_rest(tmp_path, ending):
    x = torch.zeros(2**24)  # 64 MiB
    (save_file if ending == ".safetensors" else torch.save)({"x": x}, tmp_path / f"x{ending}")
    del x
    before = resident()
    source, out = weights(tmp_path / f"x{ending}"), torch.empty(1000)
    source.read("params.x", 2**23, out)
    assert resident() - before < 16 * 2**20


def resident() -> int:
    """Return the bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_file_may_be_a_link_as_in_the_hubs_cache(tmp_path):
    single(tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert_holds(weights(tmp_path / "model.safetensors"), tensors())


INDICES = {
    "a parent": ({"a": "../x.safetensors"}, "leads out"),
    "an absolute path": ({"a": "/x.safetensors"}, "leads out"),
    "a folder": ({"a": "sub/x.safetensors"}, "leads out"),
    "a hidden file": ({"a": ".x.safetensors"}, "leads out"),
    "a null": ({"a": "x\0.safetensors"}, "leads out"),
    "another index": ({"a": "model.safetensors.index.json"}, "leads out"),
    "a missing shard": ({"a": "none.safetensors"}, "missing"),
    "another kind": ({"a": "config.json"}, "not a file of weights"),
    "a missing tensor": ({"x": "x.safetensors", "b": "x.safetensors"}, "missing from its shard"),
    "another shard": ({"x": "y.safetensors", "y": "x.safetensors"}, "missing from its shard"),
    "twice": ({"x": "x.safetensors", "z": "z.safetensors"}, "two shards have"),
    "unnamed": ({"z": "z.safetensors"}, "does not name"),
    "no table": ([], "cannot be read"),
    "an empty one": ({}, "cannot be read"),
    "a number": ({"a": 3}, "cannot be read"),
    "a list": ({"a": ["x.safetensors"]}, "cannot be read"),
}


@pytest.mark.parametrize(("table", "what"), INDICES.values(), ids=INDICES)
def test_an_index_that_no_one_writes_is_refused(tmp_path, table, what):
    (tmp_path / "in").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    for name, held in (("x", "x"), ("y", "y"), ("z", "zx")):
        save_file({one: torch.ones(1) for one in held}, tmp_path / "in" / f"{name}.safetensors")
    index = tmp_path / "in" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": table}))
    with pytest.raises(StorageError, match=what):
        weights(index)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"weight_map": null}', "[" * 100_000, '{"x": {}}', "\xff"])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StorageError, match="an index cannot be read"):
        weights(tmp_path)


OTHER = {
    "a list": ([torch.ones(1)], "does not hold a state dict"),
    "a tensor": (torch.ones(1), "does not hold a state dict"),
    "nothing": ({}, "empty"),
    "text in it": ({"a": torch.ones(1), "b": "x"}, "not a tensor"),
    "None in it": ({"a": None}, "not a tensor"),
    "a number for a name": ({1: torch.ones(1)}, "not a string"),
    "two at once": ({"model": {"a": torch.ones(1)}, "state_dict": {"a": torch.ones(1)}}, "not clear"),
    "beside tensors": ({"model": {"a": torch.ones(1)}, "a": torch.ones(1)}, "not clear"),
    "sparse": ({"a": torch.eye(3).to_sparse()}, "not a tensor"),
    "without data": ({"a": torch.ones(3, device="meta")}, "not a tensor"),
    "of a dtype beyond files": ({"a": torch.ones(3, dtype=torch.complex128)}, "not a tensor"),
}


@pytest.mark.parametrize(("held", "what"), OTHER.values(), ids=OTHER)
def test_what_is_no_state_dict_is_refused(tmp_path, held, what):
    torch.save(held, tmp_path / "x.pt")
    with pytest.raises(StorageError, match=what):
        weights(tmp_path / "x.pt")


def test_directories_that_do_not_say_which_are_refused(tmp_path):
    with pytest.raises(StorageError, match="no weights here"):
        weights(tmp_path)
    single(tmp_path / "a.safetensors")
    single(tmp_path / "b.safetensors")
    with pytest.raises(StorageError, match="several files"):
        weights(tmp_path)


@pytest.mark.parametrize("name", ["none", "none.pt", "none.safetensors", "none.safetensors.index.json"])
def test_what_is_not_there_is_refused(tmp_path, name):
    with pytest.raises(StorageError):
        weights(tmp_path / name)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_pipe_or_a_folder_is_refused_and_does_not_hang(tmp_path, name):
    os.mkfifo(tmp_path / name)
    (tmp_path / "folder" / name).mkdir(parents=True)
    for path in (tmp_path / name, tmp_path / "folder"):
        with pytest.raises(StorageError):
            weights(path)


def test_the_format_before_zip_is_refused_with_the_way_out(tmp_path):
    torch.save(tensors(), tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(StorageError, match="cannot be read in parts"):
        weights(tmp_path / "x.pt")


def header(entries, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
HEADERS = {
    "nothing": b"",
    "cut": b"\1",
    "no header": header(b""),
    "no JSON": header(b"{x"),
    "a list": header([1]),
    "beyond the file": header({}, length=10**6),
    "absurdly long": header({}, length=2**64 - 1),
    "deep": header(b'{"a":' * 100_000),
    "a gap": header({"a": ONE | {"data_offsets": [4, 8]}}, b"x" * 8),
    "too short": header({"a": ONE}, b"xyz"),
    "too long": header({"a": ONE}, b"12345"),
    "another size": header({"a": ONE | {"shape": [2]}}, b"1234"),
    "negative": header({"a": ONE | {"shape": [-1, -1]}}, b"1234"),
    "text": header({"a": ONE | {"shape": "1"}}, b"1234"),
    "a fraction": header({"a": ONE | {"shape": [1.0]}}, b"1234"),
    "three offsets": header({"a": ONE | {"data_offsets": [0, 4, 4]}}, b"1234"),
    "backwards": header({"a": ONE | {"data_offsets": [4, 0]}}, b"1234"),
    "an unknown dtype": header({"a": ONE | {"dtype": "F3"}}, b"1234"),
    "a dtype that is none": header({"a": ONE | {"dtype": []}}, b"1234"),
    "more fields": header({"a": ONE | {"x": 1}}, b"1234"),
    "fewer fields": header({"a": {"dtype": "F32"}}, b"1234"),
    "overlapping": header({"a": ONE, "b": ONE}, b"1234"),
    "twice": header(b'{"a":' + json.dumps(ONE).encode() + b',"a":' + json.dumps(ONE).encode() + b"}", b"1234"),
    "huge": header({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 2**126]}}, b"1234"),
    "digits": header(b'{"a": ' + b"9" * 5000 + b"}"),
}


@pytest.mark.parametrize("raw", HEADERS.values(), ids=HEADERS)
def test_safetensors_that_no_one_writes_are_refused(tmp_path, raw):
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(StorageError, match="cannot be read"):
        weights(tmp_path / "x.safetensors")


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_a_file_that_was_cut_off_is_refused(tmp_path, name):
    (single if name.endswith("safetensors") else in_torch)(tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    for length in {0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1}:
        (tmp_path / name).write_bytes(whole[:length])
        with pytest.raises(StorageError):
            read_all(weights(tmp_path / name))


def test_a_safetensors_file_that_changes_its_size_is_refused_at_reading(tmp_path):
    single(tmp_path / "x.safetensors")
    source = weights(tmp_path / "x.safetensors")
    with open(tmp_path / "x.safetensors", "ab") as file:
        file.write(b"x")
    with pytest.raises(StorageError, match="changed while"):
        read_all(source)
    (tmp_path / "x.safetensors").unlink()
    with pytest.raises(StorageError, match="changed while"):
        read_all(source)


def replace(path: Path, kind: str) -> None:
    """Put something in the place of a small file that nobody should wait for, or read to its end."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.truncate(2**40)  # full of holes


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge"])
def test_what_is_no_small_file_is_refused_as_an_index_and_not_waited_for(tmp_path, kind):
    sharded(tmp_path / "model", ".safetensors", save_file)
    replace(tmp_path / "model" / "model.safetensors.index.json", kind)
    with pytest.raises(StorageError, match="an index cannot be read"):
        weights(tmp_path / "model")


def test_an_index_may_be_a_link(tmp_path):
    want = sharded(tmp_path / "model", ".safetensors", save_file)
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.rename(tmp_path / "blob")
    index.symlink_to("../blob")  # as in Hugging Face's cache
    assert_holds(weights(tmp_path / "model"), want)
    (tmp_path / "blob").unlink()
    with pytest.raises(StorageError, match="an index cannot be read"):
        weights(index)


def test_an_index_that_names_a_tensor_twice_is_refused(tmp_path):
    sharded(tmp_path / "model", ".safetensors", save_file)
    index = tmp_path / "model" / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace('"weight_map": {', '"weight_map": {"half": "model-0.safetensors", '))
    with pytest.raises(StorageError, match="stands twice"):
        weights(index)


@pytest.mark.parametrize("shape", [[2**70, 0], [0, 2**63], [2**32, 2**32, 0], [2**63 - 1, 0, 2], [2**63] * 10**5 + [0]])
def test_a_shape_beyond_every_tensor_is_refused_though_it_has_no_elements(tmp_path, shape):
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(StorageError, match="a file cannot be read"):
        weights(tmp_path / "x.safetensors")


def test_columns_are_read_by_their_own_bytes(tmp_path, monkeypatch):
    wide, thin = torch.randn(6, 4096), torch.randn(64, 8)
    save_file({"wide": wide, "thin": thin}, tmp_path / "x.safetensors")
    source, counted = weights(tmp_path / "x.safetensors"), []
    read = source.read
    source = attrs.evolve(source, read=lambda name, start, out: counted.append(out.nbytes) or read(name, start, out))
    for name, x, columns, most in (("wide", wide, (1024, 2048), 6 * 2048 * 4), ("thin", thin, (2, 4), thin.nbytes)):
        counted.clear()
        out = torch.empty(x.shape[0], columns[1])
        source.fill(f"params.{name}", ((0, x.shape[0]), columns), 0, out.view(-1))
        assert torch.equal(out, x[:, columns[0] : sum(columns)]) and sum(counted) <= most


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_weights_are_encoded_as_they_are_read(stage, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "BLOCK", 4096)  # so that a matrix is encoded in several blocks
    torch.manual_seed(0)
    params = {"a.weight": torch.randn(70, 300), "a.bias": torch.randn(70), "b.weight": torch.randn(3, 70)}
    save_file({name: x.to(dtype) for name, x in params.items()}, tmp_path / "x.safetensors")
    want = {name: x.to(dtype).float() for name, x in params.items()}

    def run():
        sharded = [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)] if stage else []
        step = fds.compose(*sharded, fds.freeze("a.weight"), fds.quantize_frozen(), fds.adamw(0.1))(lambda p, b: p)
        state = fds.import_weights(tmp_path / "x.safetensors", step, want)
        assert_same_bits(tree.paths(state), tree.paths(step.init(want)))
        files = fds.export_weights(state, tmp_path / f"codes{stage}", None, step=step)  # codes come back as they are
        again = fds.import_weights(files[0], step, want)
        assert_same_bits(tree.paths(again), tree.paths(state))
        return True

    assert all(fds.simulate(run, 2 if stage else 1))


def test_a_view_that_takes_no_rows_encodes_whole_parameters(tmp_path):
    class Halves:
        draws = False

        def encode(self, x, leaf):
            return x if leaf.trained else x.flip(0).to(torch.float16)

        def __call__(self, x, leaf, call):
            return x if leaf.trained else x.flip(0).to(torch.float32)

    params = {"a": torch.randn(37, 5), "b": torch.randn(4)}
    save_file(params, tmp_path / "x.safetensors")
    halves = transform(lambda: lambda step: fill(step, view=Halves()))

    def run():
        sharded = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=3)
        step = fds.compose(sharded, fds.freeze("a"), halves(), fds.sgd(0.1))(lambda p, b: p)
        state = fds.import_weights(tmp_path / "x.safetensors", step, params)
        assert_same_bits(tree.paths(state), tree.paths(step.init(params)))
        return True

    assert all(fds.simulate(run, 2))


@pytest.fixture
def filled_memory():
    """Fill new memory with NaN, as torch does where algorithms are to be deterministic."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_padding_of_slices_is_zero_whatever_memory_held(tmp_path, filled_memory):
    params = {"a": torch.randn(37, 5), "b": torch.randn(41)}
    save_file(params, tmp_path / "x.safetensors")

    def run():
        step = fds.compose(fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=3), fds.adamw(0.1))(lambda p, b: p)
        state = fds.import_weights(tmp_path / "x.safetensors", step, params)
        assert_same_bits(tree.paths(state), tree.paths(step.init(params)))
        return True

    assert all(fds.simulate(run, 2))
