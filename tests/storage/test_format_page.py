"""docs/format.md tells enough to read and to write a save without fds and without torch."""

import datetime
import json
import os
import re

import attrs
import numpy as np
import pytest
import torch
import xxhash
from torch import nn

import fds
from fds import plans, tree
from fds.storage.format import manifest
from fds.storage.format.tensors import CODES, DTYPES
from tests.bits import assert_same_bits
from tests.laws.problems import language, token_mean
from tests.storage.page import PAGE, assert_read, page_reader
from tests.storage.states import Template, small_state, state_of
from tests.storage.topologies import Stages, Topology, plain


@pytest.fixture(scope="module")
def read():
    return page_reader()


def test_the_reader_reads_every_dtype(tmp_path, read):
    bits = torch.arange(256, dtype=torch.uint8)
    params = {name: (bits & 1 if dtype is torch.bool else bits).view(dtype) for name, dtype in DTYPES.items()}
    params |= {"scalar": torch.tensor(3.5), "empty": torch.ones(0, 2), "…é\n": torch.arange(6.0).view(2, 3).T}
    state = state_of(params)
    fds.save(tmp_path, state, Template(state), extra={"é": [1.5, None, -3]})
    leaves, extra = read(tmp_path)
    assert_read(leaves, tree.paths(state))
    assert extra == {"é": [1.5, None, -3]}
    assert leaves["params.bfloat16"].dtype == "<u2" and leaves["params.float32"].dtype == "<f4"
    assert leaves["params.int64"].dtype == "<i8" and leaves["params.bool"].dtype == "?"


def test_the_reader_reads_leaves_of_many_blocks(tmp_path, read):
    state = state_of({"a": torch.randn(3_000_001), "b": torch.randn(5, 7), "c": torch.randn(5_000_000).bfloat16()})
    fds.save(tmp_path, state, Template(state))
    record = json.loads((tmp_path / "step00000000" / "manifest.json").read_text())
    assert len(record["leaves"]["params.a"]["chunks"]) == 2 == len(record["leaves"]["params.c"]["chunks"])
    assert_read(read(tmp_path)[0], tree.paths(state))


@pytest.mark.parametrize("topology", [Topology(3, 1, 300), Topology(4, 3, replicas=2)], ids=["stage 1", "stage 3"])
def test_the_reader_reads_what_many_ranks_wrote(tmp_path, read, topology):
    apply, params, _ = fds.functional(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).bfloat16())

    def body():
        loss = lambda params, batch: apply(params, batch).square().mean()
        step = fds.compose(topology.shard(), fds.adamw(0.1), fds.ema(0.9))(loss)
        state, _ = step(step.init(params), torch.ones(2, 6).bfloat16())
        fds.save(tmp_path, state, step, "best")
        return plain(state, step)

    want = fds.simulate(body, topology.ranks)[0]
    assert want["params.0.weight"].dtype is torch.bfloat16
    assert_read(read(tmp_path)[0], want)
    assert_read(read(tmp_path, "best")[0], want)


@pytest.mark.parametrize("stages", [Stages(2), Stages(2, plans.zb_h1, 2, 2)], ids=["pp2", "pp2 x dp2"])
def test_the_reader_reads_what_stages_wrote(tmp_path, read, stages):
    layers = [nn.Embedding(7, 6), nn.Linear(6, 6), torch.tanh, nn.Linear(6, 7)]

    def body():
        step = fds.compose(*stages.transforms(), fds.adam(0.01))(fds.Layers(layers, token_mean))
        state, _ = step(step.init(step.loss.init), language(0))
        fds.save(tmp_path, state, step)
        return plain(state, step)

    want = {name: x for leaves in stages.run(body) for name, x in leaves.items()}
    assert_read(read(tmp_path)[0], want)


def test_the_reader_finds_what_a_killed_save_was_replacing(tmp_path, read):
    fds.save(tmp_path, small_state(3), Template(small_state()), "best")
    (tmp_path / ".saving" / "old").mkdir(parents=True)
    os.rename(tmp_path / "best", tmp_path / ".saving" / "old" / "best")
    assert_read(read(tmp_path)[0], tree.paths(small_state(3)))


@pytest.mark.parametrize("at", [0, 8, 4095, 4096, -1])
def test_the_reader_sees_every_changed_byte(tmp_path, read, at):
    path = fds.save(tmp_path, small_state(1), Template(small_state())) / "rank0.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError):
        read(tmp_path)


def test_the_page_names_every_field_and_dtype():
    text = PAGE.read_text()
    tables = set(re.findall(r"`([\w.<>]+)`", "\n".join(re.findall(r"^\|.*", text, re.MULTILINE))))
    for record in (manifest.Manifest, manifest.Chunk):
        assert {field.name for field in attrs.fields(record)} <= tables
    assert all(
        f'"{field.name}"' in text for record in (manifest.File, manifest.SavedLeaf) for field in attrs.fields(record)
    )
    assert {*DTYPES, *CODES.values()} <= tables
    assert f"This is format {manifest.FORMAT}." in text


def checksum(data):
    return f"xxh3:{xxhash.xxh3_64_hexdigest(data)}"


def written(run, tag, leaves, extra, most):
    """Write a save by the page alone: two files, each leaf cut between them, in chunks of `most` elements."""
    codes = {"<f4": ("float32", "F32"), "<i8": ("int64", "I64"), "<u2": ("bfloat16", "BF16")}
    new = run / ".saving" / "new" / tag
    new.mkdir(parents=True)
    (run / ".saving" / "old").mkdir()
    files, told = (
        {},
        {name: {"dtype": codes[x.dtype.str][0], "shape": [*x.shape], "chunks": []} for name, x in leaves.items()},
    )
    for i, file in enumerate(("one.safetensors", "two.safetensors")):
        header, data, ends = {}, b"", []
        for name, x in sorted(leaves.items(), key=lambda item: -item[1].itemsize):
            cut = x.size // 2
            half = x.reshape(-1)[cut:] if i else x.reshape(-1)[:cut]
            header[name] = {
                "dtype": codes[x.dtype.str][1],
                "shape": [half.size],
                "data_offsets": [len(data), len(data) + half.nbytes],
            }
            ends.append((name, len(data), i * cut, half))
            data += half.tobytes()
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 4096)
        head = len(text).to_bytes(8, "little") + text
        (new / file).write_bytes(head + data)
        files[file] = {"bytes": len(head) + len(data), "header": checksum(head)}
        for name, at, start, half in ends:
            for j in range(0, half.size, most):
                piece = half[j : j + most]
                told[name]["chunks"].append(
                    {
                        "file": file,
                        "offset": len(head) + at + j * half.itemsize,
                        "box": None,
                        "start": start + j,
                        "length": piece.size,
                        "checksum": checksum(piece.tobytes()),
                    }
                )
    fields = {
        "format": 3,
        "fds": "another program",
        "torch": "none",
        "tag": tag,
        "calls": int(leaves["calls"]),
        "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
        "part": None,
        "composition": [],
        "files": files,
        "leaves": told,
        "extra": extra,
    }
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    (new / "manifest.json").write_text(json.dumps({**fields, "checksum": checksum(canonical.encode())}, indent=1))
    (run / ".saving" / "latest").write_text(f"{tag}\n")
    os.rename(new, run / tag)
    os.rename(run / ".saving" / "latest", run / "latest")


@pytest.mark.parametrize("most", [1, 5, 1000])
def test_fds_loads_what_another_program_wrote(tmp_path, most):
    state = state_of(
        {"w": torch.randn(7, 9), "h": torch.randn(11).bfloat16()}, calls=4, opt={"exp_avg": {"w": torch.randn(7, 9)}}
    )
    as_array = lambda x: (x.view(torch.uint16) if x.dtype is torch.bfloat16 else x).numpy()
    leaves = {name: np.ascontiguousarray(as_array(x)).reshape(x.shape) for name, x in tree.paths(state).items()}
    written(tmp_path, "theirs", leaves, {"from": "elsewhere"}, most)
    loaded, extra = fds.load(tmp_path, Template(state), state.params)
    assert_same_bits(loaded, state)
    assert extra == {"from": "elsewhere"}
    fds.save(tmp_path, loaded, Template(state))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "latest", "step00000004", "theirs"]
