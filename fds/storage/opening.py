"""Open a save, a DeepSpeed checkpoint or a file of weights as a source."""

from __future__ import annotations

import os

from fds.storage import foreign
from fds.storage.disk.folders import find, tags
from fds.storage.disk.open_folder import OpenFolder
from fds.storage.disk.paths import checked_path, read_errors
from fds.storage.foreign.weight_files import INDEX, SAFETENSORS, TORCH
from fds.storage.format.manifest import read_manifest
from fds.storage.source import Source, save_source

DEEPSPEED = "*model_states.pt"
WEIGHTS = (SAFETENSORS, *TORCH, INDEX)


def open_source(path: str | os.PathLike[str], tag: str | None = None, *, verify: bool = True) -> Source:
    """Open the save under a tag of a run's directory, by default the last.

    `path` may also be a DeepSpeed checkpoint directory, or anything that `import_weights` takes. Bytes of a save are
    compared with their checksums when they are read, unless `verify` is false. Raises `StorageError`.
    """
    path = checked_path(path, "dir")
    with read_errors("load", path):
        if path.is_dir() and not tags(path):
            if any(path.glob(DEEPSPEED)) or any(path.glob(f"*/{DEEPSPEED}")):
                return foreign.deepspeed(path, tag)
            if tag is None and any(p.name.endswith(WEIGHTS) for p in path.iterdir()):
                return foreign.weights(path)
        if tag is None and path.is_file() and path.name.endswith(WEIGHTS):
            return foreign.weights(path)
        folder = OpenFolder.of(find(path, tag))
        return save_source(read_manifest(folder), [folder], verify=verify)
