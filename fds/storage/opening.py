"""Opening: whatever state or weights are kept at a path, as a source."""

from __future__ import annotations

import os

from fds.storage import foreign
from fds.storage.disk.folders import find, tags
from fds.storage.disk.held import Held
from fds.storage.disk.paths import checked_path, reading
from fds.storage.foreign.weight_files import INDEX, SAFETENSORS, TORCH
from fds.storage.format.manifest import read_manifest
from fds.storage.source import Source, saved

DEEPSPEED = "*model_states.pt"
WEIGHTS = (SAFETENSORS, *TORCH, INDEX)


def open_source(path: str | os.PathLike, tag: str | None = None, *, verify: bool = True) -> Source:
    """Return what is kept at a path: the save under a tag of a run's directory, by default the last.

    Takes a DeepSpeed checkpoint directory and what `import_weights` takes as well. Bytes of a save that are read are
    compared with their checksums unless `verify` is false. Raises `StorageError`.
    """
    path = checked_path(path, "dir")
    with reading("load", path):
        if path.is_dir() and not tags(path):
            if any(path.glob(DEEPSPEED)) or any(path.glob(f"*/{DEEPSPEED}")):
                return foreign.deepspeed(path, tag)
            if tag is None and any(p.name.endswith(WEIGHTS) for p in path.iterdir()):
                return foreign.weights(path)
        if tag is None and path.is_file() and path.name.endswith(WEIGHTS):
            return foreign.weights(path)
        folder = Held.of(find(path, tag))
        return saved(read_manifest(folder), [folder], verify=verify)
