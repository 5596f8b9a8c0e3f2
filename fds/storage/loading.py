"""Load a state: the step says what it must be, the manifest what there is."""

from __future__ import annotations

import contextlib
import hashlib
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
from fds.storage.parts import Part, blank, parts_of
from fds.storage.tensors import open_tensors, read_into
from fds.storage.together import Ranks
from fds.storage.union import Union, agreement


def load(dir: str | os.PathLike, step: Step, params: Any, *, tag: str | None = None) -> tuple[State, dict[str, Any]]:
    """Read a state that `save` wrote below `dir`, and the `extra` that was saved with it.

    Where ranks share the state, all of them call this, and each reads what it will hold. On how many ranks, in which
    pipeline, at which stage and in which buckets the state was saved makes no difference.

    Args:
        dir: the run's directory.
        step: the step that will go on; its plain state's structure must be that of the saved one.
        params: what `step.init` would take: tensors, `meta` tensors or a recipe. Only structure is read, and the
            device that the state goes to (that of the first tensor with data, else torch's default).
        tag: which save; by default the last.

    Raises `StorageError` if there is no such save, if it is of another model or composition (the first parameter, or
    slot, that differs is named), or if a byte of it is not as it was written; on every rank if on any. Raises
    `RankError` if a rank is lost.
    """
    ranks = Ranks.of(step)
    with ranks.together() as said:
        place = find(Path(dir), tag).relative_to(dir) if ranks.index == 0 else Path()  # others might see a newer one
        said.mine = {"place": str(place), "asked": {"tag": repr(tag)}}
    ranks.refuse_different([one["asked"] for one in said.all])
    folder = Path(dir) / said.all[0]["place"]
    with ranks.together():
        manifest, template = read_manifest(folder), step.structure(params)
        own = parts_of(template, ranks.slice)
    union = Union.of(own, ranks)
    with ranks.together() as said:
        _refuse_other(manifest, union.leaves | {name: part.leaf() for name, part in own.items()}, folder)
        state = blank(step, template, _device(params))
        _fill(parts_of(state, ranks.slice), manifest, folder)
        read = hashlib.blake2b(repr(manifest).encode(), digest_size=8).hexdigest()
        said.mine = {"save that they read": read, **agreement(own, ranks)}
    ranks.refuse_different(said.all)
    return state, manifest.extra


def _fill(parts: Mapping[str, Part], manifest: Manifest, folder: Path) -> None:
    """Read what overlaps the parts, one chunk at a time, into their tensors."""
    files: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for name, part in parts.items():
            flat = part.tensor.view(-1)
            for chunk in manifest.leaves[name].chunks:
                low, high = max(part.start, chunk.start), min(part.end, chunk.start + chunk.length)
                if part.split and low >= high:
                    continue
                if chunk.file not in files:
                    files[chunk.file] = stack.enter_context(open_tensors(folder / chunk.file))
                out, where = flat[low - part.start : high - part.start], f"{folder / chunk.file}: {name}"
                direct = out.numel() == chunk.length and out.device.type == "cpu"
                read = out if direct else torch.empty(chunk.length, dtype=out.dtype, device="cpu")
                read_into(read, files[chunk.file], name, chunk.checksum, where)
                if not direct:
                    out.copy_(read[low - chunk.start : high - chunk.start])


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
