"""Load a state: the step says what it must be, the manifest what there is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fds import tree
from fds.errors import StorageError, did_you_mean
from fds.state import State
from fds.step import Step
from fds.storage.folders import find
from fds.storage.manifest import Leaf, Manifest, read_manifest
from fds.storage.tensors import DTYPES, dtype_name, open_tensors, read_into

ON_HOST = ("calls", "key")  # what the host reads without asking the device


def load(dir: str | os.PathLike, step: Step, params: Any, *, tag: str | None = None) -> tuple[State, dict[str, Any]]:
    """Read a state that `save` wrote below `dir`, and the `extra` that was saved with it.

    Args:
        dir: the run's directory.
        step: the step that will go on; its state's structure must be that of the saved one.
        params: what `step.init` would take: tensors, `meta` tensors or a recipe. Only structure is read, and the
            device that the state goes to (that of the first tensor with data, else torch's default).
        tag: which save; by default the last.

    Raises `StorageError` if there is no such save, if it is of another model or composition (the first parameter, or
    slot, that differs is named), or if a byte of it is not as it was written.
    """
    folder = find(Path(dir), tag)
    manifest, template = read_manifest(folder), step.structure(params)
    want = {name: Leaf(dtype_name(x), tuple(x.shape), ()) for name, x in tree.paths(template).items()}
    _refuse_other(manifest, want, folder)
    read = _read(folder, {name: manifest.leaves[name] for name in want}, _device(params))
    return tree.flatten(template)[1](read), manifest.extra


def _read(folder: Path, leaves: Mapping[str, Leaf], device: torch.device) -> list[Tensor]:
    """Read leaves into memory of their own, one at a time on its way to the device."""
    read = []
    with contextlib.ExitStack() as stack:
        files = {
            name: stack.enter_context(open_tensors(folder / name))
            for name in dict.fromkeys(chunk.file for leaf in leaves.values() for chunk in leaf.chunks)
        }
        for name, leaf in leaves.items():
            x = torch.empty(leaf.shape, dtype=DTYPES[leaf.dtype], device="cpu")
            for chunk in leaf.chunks:
                part = x.view(-1)[chunk.start : chunk.start + chunk.length]
                read_into(part, files[chunk.file], name, chunk.checksum, f"{folder / chunk.file}: {name}")
            read.append(x if name in ON_HOST else x.to(device))
    return read


def _refuse_other(manifest: Manifest, want: Mapping[str, Leaf], folder: Path) -> None:
    """Raise `StorageError` for the first leaf that the save and the step do not share: parameters before the rest."""
    have = manifest.leaves
    differ = [n for n in want if n in have and str(have[n]) != str(want[n])]
    lacking, beyond = [n for n in want if n not in have], [n for n in have if n not in want]
    odd = sorted([*differ, *lacking, *beyond], key=lambda name: name.split(".")[0] != "params")
    if not odd:
        return
    name, hints = odd[0], []
    if name.split(".")[0] == "params":
        what = "this is a save of another model" if name in differ else "this save has other parameters"
    else:
        what = "this save is of another composition" if name.split(".")[0] in ("opt", "slots") else "leaves differ"
    if name in lacking and beyond:
        hints.append(did_you_mean(name, beyond))
    if len(odd) > 1:
        hints.append(f"{len(odd)} leaves differ in all")
    hints.append(f"it was saved by compose({', '.join(manifest.composition)})")
    raise StorageError(
        f"{what}: {name}", where=str(folder),
        got=f"{have[name]} in the save" if name in have else "nothing in the save",
        want=f"{want[name]}, as this step has it" if name in want else "nothing, as this step has it",
        hint="\n".join(hints),
    )  # fmt: skip


def _device(params: Any) -> torch.device:
    leaves = [] if callable(params) else tree.leaves(params)
    real = (x.device for x in leaves if isinstance(x, Tensor) and not x.is_meta)
    return next(real, torch.get_default_device())
