"""A checkpoint of torch.distributed.checkpoint as a source: a model's parameters and buffers, and an optimizer's state.

A state dict may be nested as its writer liked. What lies where in it is found by what torch's optimizers have: `state`
and `param_groups`, and beside them a dict of tensors that has the parameters.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from fds.errors import StorageError
from fds.storage.disk.files import refusal
from fds.storage.foreign.dcp_files import Item, Keys, SavedTensor, open_folder, read_box, read_value
from fds.storage.foreign.dcp_state import (
    DDP,
    GROUPS,
    STATE,
    OptimizerState,
    below,
    in_model,
    plain,
    trained_keys,
    unwrapped,
)
from fds.storage.foreign.foreign_leaf import ForeignLeaf, number, source_of
from fds.storage.format import boxes
from fds.storage.format.manifest import SavedLeaf, check_extra
from fds.storage.format.tensors import dtype_name
from fds.storage.source import Source

AMSGRAD = "max_exp_avg_sq"  # beside exp_avg and exp_avg_sq, which go on without it
MODELS = ("model", "state_dict", "module")  # what a model is called where others have its names too


def dcp(
    paths: Sequence[str | os.PathLike[str]],
    model: str | None = None,
    optimizer: str | None = None,
    *,
    skip: bool = False,
    is_param: Callable[[str], bool] | None = None,
) -> Source:
    """Open what `torch.distributed.checkpoint.save` wrote of an FSDP2 run, or of any other.

        params.<name>       the tensors of the model, as in its `state_dict`
        buffers.<name>      those that neither an optimizer nor `is_param` has, where both are given
        opt.<slot>.<name>   what the optimizer has of a parameter in its shape: exp_avg, exp_avg_sq, ...
        step, calls         the updates that the optimizer counts; 1 where it has slots and counts none

    Names are without those of wrappers: `_orig_mod` of torch.compile, those of activation checkpointing, and a first
    `module.` of DDP that no parameter has. `extra` has the optimizer's `param_groups`, and whatever else is JSON,
    nested as it was; `composition` says what was left out.

    Args:
        paths: folders, of which one may have the model, another the optimizer.
        model, optimizer: where in the state dict these are, keys with dots between; None finds them.
        skip: leave out what the optimizer has.
        is_param: says of a name whether it is a parameter's; None where nobody knows.

    Warns (`UserWarning`) of an optimizer's state that is left out. Raises `StorageError` for files that are missing,
    damaged or of another program, for several models or optimizers, and for an optimizer whose parameters have not all
    had the same number of updates.
    """
    folders = [open_folder(Path(path)) for path in paths]
    where = ", ".join(folder.where for folder in folders)
    tensors = _joined([folder.tensors for folder in folders], where)
    values = _joined([folder.values for folder in folders], where)
    root = _optimizer_root([*tensors, *values], optimizer, where)
    state = OptimizerState() if root is None or skip else OptimizerState.of(tensors, values, root, where)
    rest = {path: x for path, x in tensors.items() if root is None or not below(path, root)}
    model_root = _model_root(rest, model, {*state.slots_of}, where)
    named = {path[-1]: x for path, x in rest.items() if path[:-1] == model_root}
    names = _without_wrappers(named, is_param, where)
    shapes = {name: x.shape for name, x in named.items() if is_param is None or is_param(names[name])}
    slots, owners, lost = state.by_parameter(shapes, {name: x.shape for name, x in named.items()}, names, where)
    keys = [] if root is None else trained_keys([*tensors, *values], root, state.groups)
    owners |= {name for name in in_model(keys, names).values() if name is not None}
    is_known = is_param is not None and owners
    kept: dict[str, ForeignLeaf] = {}
    for name, x in named.items():
        kind = "buffers" if is_known and name not in owners and name not in shapes else "params"
        kept[f"{kind}.{names[name]}"] = _leaf(x)
    if any(slot == AMSGRAD for slot, _ in slots):
        lost.append(f"left out: {AMSGRAD} of amsgrad, which is no slot of fds")
    kept |= {f"opt.{slot}.{names[name]}": _leaf(x) for (slot, name), x in slots.items() if slot != AMSGRAD}
    updates = state.updates
    if updates is None and slots:  # of SGD: at step 0 a buffer would count as never written
        lost.append("the optimizer counts no updates: step and calls are 1, from which schedules go on")
        updates = 1
    if updates is not None:
        kept |= {leaf: number(updates, torch.int64) for leaf in ("step", "calls")}
    others = {path: x for path, x in rest.items() if path[:-1] != model_root}
    extra, dropped = _extra(others, {p: x for p, x in values.items() if root is None or not below(p, root)})
    if state.groups:
        extra[GROUPS] = state.groups
    if lost:
        warnings.warn(f"{where}: {'; '.join(lost)}", stacklevel=2)
    title = f"torch.distributed.checkpoint, {len(named)} tensors of {'.'.join(model_root) or 'a model'}"
    return source_of(where, kept, extra, [title, *lost, *state.unreadable, *dropped])


T = TypeVar("T")


def _joined(tables: Sequence[dict[Keys, T]], where: str) -> dict[Keys, T]:
    """Return all entries of several folders. Raises `StorageError` for one that two of them have."""
    joined: dict[Keys, T] = {}
    for table in tables:
        if twice := joined.keys() & table.keys():
            raise refusal("two folders have the same key", where, ".".join(min(twice)), "a folder of each part")
        joined.update(table)
    return joined


def _leaf(x: SavedTensor) -> ForeignLeaf:
    leaf, box = SavedLeaf(dtype_name(x.dtype), x.shape, ()), boxes.whole(x.shape)
    return ForeignLeaf(leaf, lambda start, out: read_box(x, box, start, out))


def _keys(text: str) -> Keys:
    return tuple(text.split(".")) if text else ()


def _optimizer_root(paths: Collection[Keys], asked: str | None, where: str) -> Keys | None:
    """Return where the optimizer is in the state dict; None where there is none."""
    heads = {word: {path[:i] for path in paths for i, key in enumerate(path) if key.partition(".")[0] == word}
             for word in (STATE, GROUPS)}  # fmt: skip
    roots = sorted(heads[STATE] & heads[GROUPS] or heads[GROUPS])  # of SGD without momentum there is no state
    roots = [root for root in roots if not any(other != root and root[: len(other)] == other for other in roots)]
    if asked is not None:
        if (root := _keys(asked)) in roots:
            return root
    elif len(roots) < 2:
        return next(iter(roots), None)
    got = ", ".join(".".join(root) or '""' for root in roots) or "no optimizer"
    raise refusal("it is not clear which optimizer this is", where, got, 'optimizer="..." with one of these')


def _model_root(tensors: Mapping[Keys, SavedTensor], asked: str | None, trained: Collection[str], where: str) -> Keys:
    """Return where the model's tensors are in the state dict."""
    names: dict[Keys, set[str]] = {}
    for path in tensors:
        names.setdefault(path[:-1], set()).add(path[-1])
    fits = [root for root in names if root == _keys(asked or "")] if asked is not None else list(names)
    if asked is None and len(fits) > 1:
        bare = lambda of: {unwrapped(name).removeprefix(DDP) for name in of}
        by_name = all(not name.isdigit() for name in trained) and trained
        fits = [root for root in fits if bare(names[root]) >= bare(trained)] if by_name else fits
        fits = [root for root in fits if root and root[-1] in MODELS] if len(fits) > 1 else fits
    if len(fits) != 1:
        got = ", ".join(sorted(".".join(root) or '""' for root in names))[:200] or "no tensors"
        raise refusal("it is not clear which tensors are the model's", where, got, 'model="..." with one of these')
    return fits[0]


def _without_wrappers(names: Collection[str], is_param: Callable[[str], bool] | None, where: str) -> dict[str, str]:
    """Return by name the same without the names of wrappers. Raises `StorageError` where two would be one."""
    new = {name: unwrapped(name) for name in names}
    if is_param is not None and all(name.startswith(DDP) for name in new.values()):
        bare = {name: other.removeprefix(DDP) for name, other in new.items()}
        new = bare if any(map(is_param, bare.values())) and not any(map(is_param, new.values())) else new
    if len({*new.values()}) < len(new):
        raise refusal("two tensors have one name without their wrappers", where, ", ".join(new)[:200])
    return new


def _extra(tensors: Mapping[Keys, SavedTensor], values: Mapping[Keys, Item]) -> tuple[dict[str, Any], list[str]]:
    """Return all other values that are JSON, nested as they were, and a note for each that is not."""
    extra, notes = dict[str, Any](), list[str]()
    for path in (*values, *tensors):
        try:
            if path in values:
                value = plain(read_value(values[path]))
            else:
                x = torch.empty(1, dtype=tensors[path].dtype, device="cpu")
                if boxes.numel(boxes.whole(tensors[path].shape)) != 1:
                    raise StorageError("a tensor")
                read_box(tensors[path], boxes.whole(tensors[path].shape), 0, x)
                value = x.item()
            check_extra({"value": value})
        except StorageError:
            notes.append(f"left out: {'.'.join(path):.80}")
            continue
        at = extra
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return extra, notes
