"""Files beside weights get their names with them, or none does."""

import os

import pytest

from fds.errors import StorageError
from fds.storage.disk.placing import INDEX, replace_files

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", INDEX]


def put(folder, names, text, beside=("config.json",)):
    with replace_files(folder, list(names)) as hidden:
        for name in (*names, *beside):
            (hidden / name).write_text(text)


def texts(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_files_beside_weights_are_replaced_with_them(tmp_path):
    put(tmp_path, ["model.safetensors"], "old", beside=["config.json", "tokenizer.json"])
    put(tmp_path, SHARDS, "new")
    assert texts(tmp_path) == {**dict.fromkeys([*SHARDS, "config.json"], "new"), "tokenizer.json": "old"}


@pytest.mark.parametrize("count", range(1, 9))
def test_what_fails_leaves_the_old_files_and_what_is_killed_leaves_no_mixture(count, tmp_path, monkeypatch):
    put(tmp_path, SHARDS, "old")
    before, rename, done, seen = texts(tmp_path), os.rename, [], []

    def failing(source, target):
        done.append(target)
        seen.append(texts_of_weights(tmp_path))
        if len(done) == count:
            raise OSError(5, "the disk fails", str(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(StorageError):
        put(tmp_path, SHARDS, "new")
    assert len(done) == count and texts(tmp_path) == before
    for weights in seen:  # had it been killed there: whoever finds an index finds all of one export
        assert INDEX not in weights or ("config.json" in weights and len(set(weights.values())) == 1)


def texts_of_weights(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
