"""Save a state."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any

import torch

from fds import tree
from fds.errors import StorageError
from fds.state import State
from fds.step import Step
from fds.storage.folders import checked_tag, publish
from fds.storage.manifest import FORMAT, Chunk, Leaf, Manifest, checked_extra, write_manifest
from fds.storage.tensors import dtype_name, refuse_unwritable, write_tensors

FILE = "rank0.safetensors"


def save(
    dir: str | os.PathLike,
    state: State,
    step: Step,
    tag: str | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write a state below `dir`, whole and durably or not at all, and return the folder of its tag.

    Args:
        dir: the run's directory, made if it is missing.
        state: what `step.init` or a step returned.
        step: whose state it is; its composition is written down for people to read.
        tag: the name of this save, `step00000012` after 12 calls unless given; one that exists is replaced.
        extra: what else the run needs to go on (a loader's position): a dict that JSON gives back as it is.

    Raises `StorageError` for whatever cannot be written or the file system refuses, `DonatedStateError` for a state
    that was given up. Then the saves that were there, and which of them is the last, are as they were.
    """
    if not isinstance(state, State):
        raise StorageError("what is to be saved is no state", got=repr(type(state).__name__), want="a State",
                           hint="fds.save(dir, state, step)")  # fmt: skip
    state.check("save")
    calls, named, extra = int(state.calls), tree.paths(state), checked_extra(extra)
    tag = f"step{calls:08d}" if tag is None else checked_tag(tag)
    refuse_unwritable(named)
    composition = tuple(map(repr, step.composition))
    with publish(Path(dir), tag) as folder:
        checksums = write_tensors(folder / FILE, named)
        leaves = {
            name: Leaf(dtype_name(x), tuple(x.shape), (Chunk(FILE, 0, x.numel(), checksums[name]),))
            for name, x in named.items()
        }
        write_manifest(folder, Manifest(
            FORMAT, _version(), torch.__version__, tag, calls, composition, leaves, extra,
        ))  # fmt: skip
    return Path(dir) / tag


def _version() -> str:
    try:
        return importlib.metadata.version("fds")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
