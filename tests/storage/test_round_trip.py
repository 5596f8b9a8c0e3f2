"""What was saved is what is loaded: every bit of every leaf, and the user's extra."""

import json
import os

import pytest
import torch
from hypothesis import assume, given, strategies as st
from safetensors.torch import load_file

import fds
from fds import tree
from fds.errors import StateError
from fds.storage.disk import writer
from fds.storage.format import manifest
from fds.storage.format.tensors import DTYPES, as_bytes, header
from tests.bits import assert_same_bits
from tests.storage.states import Template, json_values, small_state, state_of, states


def same(got, want):
    assert tree.structure(got) == tree.structure(want)
    assert_same_bits(got, want)


@given(states(), st.dictionaries(st.text(max_size=5), json_values, max_size=3))
def test_loading_what_was_saved_is_the_identity(tmp_path_factory, state, extra):
    try:
        tree.paths(state)
    except StateError:
        assume(False)
    dir = tmp_path_factory.mktemp("run")
    folder = fds.save(dir, state, Template(state), extra=extra)
    loaded, found = fds.load(dir, Template(state), state.params)
    same(loaded, state)
    assert found == extra and type(found) is dict
    assert folder == dir / f"step{int(state.calls):08d}"
    assert all(x.is_contiguous() for x in tree.leaves(loaded))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_keeps_its_bits(tmp_path, name):
    dtype = DTYPES[name]
    patterns = torch.arange(256, dtype=torch.uint8).repeat(16)
    patterns = patterns & 1 if dtype is torch.bool else patterns
    x = patterns.view(dtype)
    state = state_of({"x": x, "scalar": x[3], "empty": x[:0].view(0, 2), "strided": x.view(-1, 2)[:, 1]})
    fds.save(tmp_path, state, Template(state))
    same(fds.load(tmp_path, Template(state), {})[0], state)


def test_nan_payloads_and_signed_zeros_survive(tmp_path):
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1, -(2**31), 0x7F800000], dtype=torch.int32)
    state = state_of(bits.view(torch.float32))
    fds.save(tmp_path, state, Template(state))
    assert torch.equal(fds.load(tmp_path, Template(state), {})[0].params.view(torch.int32), bits)


def test_lazy_conjugates_and_negatives_are_written_as_they_read(tmp_path):
    z = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    state = state_of({}, buffers={"conj": z.conj(), "neg": z.conj().imag, "view": torch._neg_view(torch.ones(2))})
    fds.save(tmp_path, state, Template(state))
    loaded, _ = fds.load(tmp_path, Template(state), {})
    assert torch.equal(loaded.buffers["conj"], z.conj()) and torch.equal(loaded.buffers["neg"], z.conj().imag)
    assert torch.equal(loaded.buffers["view"], -torch.ones(2))


def test_shared_memory_is_written_twice_and_comes_back_apart(tmp_path):
    x = torch.arange(6.0)
    state = state_of({"a": x, "b": x.view(2, 3), "c": x[1:3]})
    fds.save(tmp_path, state, Template(state))
    loaded, _ = fds.load(tmp_path, Template(state), {})
    same(loaded, state)
    loaded.params["a"].zero_()
    assert torch.equal(loaded.params["b"], x.view(2, 3))


def test_a_loaded_state_does_not_hold_on_to_its_files(tmp_path):
    state = small_state(1)
    folder = fds.save(tmp_path, state, Template(state))
    loaded, _ = fds.load(tmp_path, Template(state), {})
    with open(folder / "rank0.safetensors", "r+b") as file:
        file.write(bytes(os.path.getsize(file.name)))
    same(loaded, state)


def test_parameters_that_require_grad_are_saved_and_come_back_plain(tmp_path):
    state = state_of(torch.nn.Parameter(torch.ones(2)))
    fds.save(tmp_path, state, Template(state))
    loaded = fds.load(tmp_path, Template(state), state.params)[0].params
    assert type(loaded) is torch.Tensor and not loaded.requires_grad


def test_the_last_save_is_loaded_unless_a_tag_is_named(tmp_path):
    for calls in (1, 3, 2):
        fds.save(tmp_path, small_state(calls), Template(small_state()), extra={"at": calls})
    assert fds.load(tmp_path, Template(small_state()), {})[1] == {"at": 2}
    assert fds.load(tmp_path, Template(small_state()), {}, tag="step00000003")[1] == {"at": 3}
    assert (tmp_path / "latest").read_text() == "step00000002\n"


def test_a_tag_is_replaced_and_nothing_of_the_old_one_stays(tmp_path):
    fds.save(tmp_path, small_state(1, width=7), Template(small_state()), "best", {"old": True})
    folder = fds.save(str(tmp_path), small_state(2), Template(small_state()), "best")
    same(fds.load(str(tmp_path), Template(small_state(2)), {}, tag="best")[0], small_state(2))
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "rank0.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "best", "latest"]


def test_a_run_can_be_moved_and_a_tag_copied(tmp_path):
    fds.save(tmp_path / "a", small_state(1), Template(small_state()), "one")
    os.rename(tmp_path / "a" / "one", tmp_path / "a" / "two")
    os.rename(tmp_path / "a", tmp_path / "b")
    same(fds.load(tmp_path / "b", Template(small_state()), {}, tag="two")[0], small_state(1))


def test_other_programs_can_read_a_save(tmp_path):
    state = small_state(5)
    folder = fds.save(tmp_path, state, Template(state), extra={"position": 7})
    tensors = load_file(folder / "rank0.safetensors")
    assert_same_bits(tensors, tree.paths(state))
    record = json.loads((folder / "manifest.json").read_text())
    assert (record["format"], record["calls"], record["tag"]) == (4, 5, "step00000005")
    assert record["torch"] == torch.__version__ and record["composition"] == ["'adamw(0.1)'"]
    assert record["extra"] == {"position": 7}
    whole = (folder / "rank0.safetensors").read_bytes()
    data = 8 + int.from_bytes(whole[:8], "little")
    assert record["files"] == {"rank0.safetensors": {"bytes": len(whole), "header": writer.checksum(whole[:data])}}
    (chunk,) = record["leaves"]["params.in.weight"].pop("chunks")
    assert record["leaves"]["params.in.weight"] == {"dtype": "float32", "shape": [4, 3]}
    held = as_bytes(state.params["in"]["weight"]).numpy().tobytes()
    assert whole[chunk["offset"] :][: len(held)] == held and data % writer.ALIGN == 0 and chunk["offset"] >= data
    assert chunk | {"offset": 0} == {
        "file": "rank0.safetensors",
        "offset": 0,
        "start": 0,
        "length": 12,
        "checksum": writer.checksum(held),
        "box": None,
    }


def test_files_get_the_permissions_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        folder = fds.save(tmp_path / "run", small_state(), Template(small_state()))
    finally:
        os.umask(before)
    assert {oct(p.stat().st_mode & 0o777) for p in folder.iterdir()} == {"0o640"}
    assert oct(folder.stat().st_mode & 0o777) == "0o750"


def test_leaves_may_be_split_into_chunks_over_several_files(tmp_path):
    state = state_of({"w": torch.arange(6.0).view(2, 3)})
    folder = fds.save(tmp_path, state, Template(state))
    flat, chunks, old = state.params["w"].view(-1), [], manifest.read_manifest(folder)
    for rank, (start, end) in enumerate([(0, 2), (2, 5), (5, 6)], start=1):
        part, file = flat[start:end], f"rank{rank}.safetensors"
        head = header([("params.w", part.dtype, tuple(part.shape))])
        (((offset, _, found),),) = writer.write(folder / file, head, [(part.data_ptr(), 4 * len(part))])
        chunks.append(manifest.Chunk(file, offset, start, end - start, found))
        old.files[file] = manifest.File(len(head) + 4 * len(part), writer.checksum(head))
    old.leaves["params.w"] = manifest.SavedLeaf("float32", (2, 3), tuple(chunks))
    (folder / "manifest.json").unlink()
    manifest.write_manifest(folder, old)
    same(fds.load(tmp_path, Template(state), {})[0], state)


def test_the_device_is_that_of_real_parameters_or_the_default(tmp_path):
    state = small_state(1)
    fds.save(tmp_path, state, Template(state))
    with torch.device("meta"):  # the only other device of every machine
        loaded, _ = fds.load(tmp_path, Template(state), lambda key: None)
        assert {n for n, x in tree.paths(loaded).items() if not x.is_meta} == {"calls", "key"}
        loaded, _ = fds.load(tmp_path, Template(state), {"a": torch.ones(2), "b": torch.ones(2, device="cpu")})
        same(loaded, state)
    loaded, _ = fds.load(tmp_path, Template(state), {"a": torch.ones(2, device="meta")})
    same(loaded, state)
