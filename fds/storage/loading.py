"""Load a state: the step says what it must be, the manifest what there is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.collectives import fingerprint
from fds.errors import StorageError
from fds.layout import Sharded
from fds.state import State
from fds.step import Step, beginning, same_composition
from fds.storage.disk.folders import SAVING, find
from fds.storage.disk.held import Held
from fds.storage.disk.paths import checked_path
from fds.storage.disk.reader import touch_fresh
from fds.storage.format.blocks import spans
from fds.storage.format.manifest import Leaf, Manifest, read_manifest
from fds.storage.matching import Options, checked_slots, match
from fds.storage.ranks import local as by_rank
from fds.storage.ranks.parts import Part, blank, parts_of
from fds.storage.ranks.together import Ranks
from fds.storage.ranks.union import Union, agreement
from fds.storage.source import Source, blank_like, saved

Slots = Literal["init", "drop"]


@torch.inference_mode(False)
def load(
    dir: str | os.PathLike,
    step: Step,
    params: Any,
    *,
    tag: str | None = None,
    slots: Slots | Iterable[Slots] = (),
    strict: bool = True,
    params_only: bool = False,
    without_optimizer: bool = False,
    without_schedule: bool = False,
    verify: bool = True,
    local: bool = False,
) -> tuple[State, dict[str, Any]]:
    """Read a state that `save` wrote below `dir`, and the `extra` that was saved with it.

    Where ranks share the state, all of them call this, and each reads what it will hold. On how many ranks, in which
    pipeline, at which stage and in which buckets the state was saved makes no difference.

    Args:
        dir: the run's directory.
        step: the step that will go on; its plain state's structure must be that of the saved one.
        params: what `step.init` would take: tensors, `meta` tensors or a recipe. Only structure is read, and the
            device that the state goes to (that of the first tensor with data, else torch's default); where parameters
            may be missing (`strict=False`), also their values.
        tag: which save; by default the last.
        slots: "init" to make afresh what optimizer and transforms remember and the save lacks, as `step.init` would
            for the loaded parameters; "drop" to leave alone what the step lacks; or both.
        strict: whether to refuse everything else that differs. If not, it is made afresh or left alone, and a
            `StorageWarning` lists exactly what was missing, unexpected, or of another shape or dtype.
        params_only: read parameters and module buffers; the run begins anew: counters at 0, key `0`.
        without_optimizer: make what the optimizer remembers afresh. Its bias corrections go on from `state.step`, as if
            the averages were old ones: `without_schedule=True` begins them again too.
        without_schedule: count updates from 0 again: schedules, and what else depends on `state.step`, restart.
        verify: compare the bytes that are read with their checksums.
        local: read what `save(..., local=True)` wrote: each rank its own directory, and those of others that it sees;
            the last save is the last that all ranks have.

    Raises `StorageError` if there is no such save, if it is of another model or composition (the first parameter, or
    slot, that differs is named), or if a byte of it is not as it was written; on every rank if on any. Raises
    `RankError` if a rank is lost.
    """
    ranks = Ranks.of(step, "load")
    with ranks.together():
        if isinstance(params, Sharded):
            raise StorageError("slices do not say what the whole parameters are", where="params",
                               got="the sharded params of a state", want="what step.init was given",
                               hint="dict(module.named_parameters()); only structure is read")  # fmt: skip
        path = checked_path(dir, "dir")
        options = Options(checked_slots(slots), strict, params_only, without_optimizer, without_schedule)
    source = by_rank.opened(path, tag, ranks, verify) if local else _opened(path, tag, ranks, verify)
    return fill(source, step, params, options, ranks), source.extra


def fill(source: Source, step: Step, params: Any, options: Options, ranks: Ranks, key: int | Tensor = 0) -> State:
    """Return a state of `step` with the leaves of a source; what is not read is as `step.init(params, key=)` makes it.

    All ranks call it. Raises `StorageError`, on every rank, for what does not match.
    """
    same_composition(step)
    with ranks.together():
        template = step.structure(params)
        own = parts_of(template, ranks.slice)
    union = Union.of(own, ranks)
    want = union.leaves | {name: part.leaf() for name, part in own.items()}
    with ranks.together() as said:
        names, device = match(source, want, options), _device(params)
        digest = fingerprint((sorted(names.items()), options))
        said.mine = {"leaves that they read": f"{len(names)} leaves, {digest}", **agreement(own, ranks)}
    ranks.refuse_different(said.all)
    afresh = {name.partition(".")[0] for name in want if name not in names}
    if not afresh:
        with ranks.together():
            state = blank(step, template, device)
            _read(parts_of(state, ranks.slice), names, source)
        return state
    if "params" in afresh:
        template = step.init(params, key=key)
    with ranks.together():
        if "params" in afresh and device.type != "meta" and any(x.is_meta for x in tree.leaves(template.params)):
            raise StorageError("what the save lacks has no values", where=source.where, got="meta tensors",
                               want="parameters with values, or a recipe that makes them")  # fmt: skip
        state = template if "params" in afresh else blank(step, template, device)
        _read(parts_of(attrs.evolve(state, opt={}, slots={}), ranks.slice), names, source)
    held = state.params
    del state, template  # or there would be two of what is made now
    state = beginning(step, held, key, device)
    with ranks.together():
        parts = parts_of(state, ranks.slice)
        _read({n: part for n, part in parts.items() if n.partition(".")[0] != "params"}, names, source)
    return state


def _opened(dir: Path, tag: str | None, ranks: Ranks, verify: bool) -> Source:
    """Return the save that the first rank finds: others might see a newer one."""
    with ranks.together() as said:
        found = _found(dir, tag) if ranks.index == 0 else None
        place = "" if found is None else str(found[0].path.relative_to(dir))
        said.mine = {"place": place, "asked": {"tag": repr(tag)}}
    ranks.refuse_different([one["asked"] for one in said.all])
    folder = dir / said.all[0]["place"]
    with ranks.together() as said:
        held, manifest = _read_in(folder) if found is None else found
        said.mine = {"save that they read": fingerprint(manifest)}
    ranks.refuse_different(said.all)
    return saved(manifest, [held], verify=verify)


def _found(dir: Path, tag: str | None, attempts: int = 5) -> tuple[Held, Manifest]:
    """Return folder and manifest of a save that can be read; another process may be replacing what is looked at."""
    before = _changed(dir)
    try:
        return _read_in(find(dir, tag))
    except StorageError:
        if attempts == 1 or (_changed(dir) == before and not (dir / SAVING).exists()):
            raise
        time.sleep(0.02)
        return _found(dir, tag, attempts - 1)


def _read_in(folder: Path) -> tuple[Held, Manifest]:
    """Return a save's folder, held open, and the manifest in it."""
    held = Held.of(folder)
    return held, read_manifest(held)


def _changed(dir: Path) -> int:
    """Return when a name in a directory changed last, 0 where there is none."""
    try:
        return os.stat(dir).st_mtime_ns
    except OSError:
        return 0


def _read(parts: Mapping[str, Part], names: Mapping[str, str], source: Source) -> None:
    """Read what the parts hold into their tensors, in the order in which it is kept."""
    kept = {name: source.leaves[names[name]] for name in parts if name in names}
    for name, leaf in sorted(kept.items(), key=lambda one: _place(parts[one[0]], one[1])):
        part = parts[name]
        flat = part.tensor.view(-1)
        if flat.device.type == "cpu" and part.leaf().dtype == leaf.dtype:
            touch_fresh(flat)
            source.read(names[name], part.start, flat)
            continue
        for start, length in spans(leaf):
            low, high = max(part.start, start), min(part.end, start + length)
            if low < high:
                piece = blank_like(leaf, high - low)
                source.read(names[name], low, piece)
                flat[low - part.start : high - part.start].copy_(piece)


def _place(part: Part, leaf: Leaf) -> tuple[str, int]:
    """Return where the first byte of a part is kept."""
    chunk = next((c for c in leaf.chunks if c.start + c.length > part.start), None)
    return ("", 0) if chunk is None else (chunk.file, chunk.offset)


def _device(params: Any) -> torch.device:
    leaves = [] if callable(params) else tree.leaves(params)
    real = (x.device for x in leaves if isinstance(x, Tensor) and not x.is_meta)
    return next(real, torch.get_default_device())
