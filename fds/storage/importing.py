"""Import weights, and the checkpoints of DeepSpeed and of torch.distributed.checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fds.errors import is_a
from fds.state import State
from fds.step import Step
from fds.storage import foreign
from fds.storage.disk.files import check_path, refusal
from fds.storage.loading import fill
from fds.storage.matching import MatchOptions
from fds.storage.ranks.exchange import Ranks
from fds.storage.ranks.leaf_parts import parts_of
from fds.storage.ranks.sharing import AllLeaves
from fds.storage.source import Source

Rename = Callable[[str], str] | Mapping[str, str]


@torch.inference_mode(False)
def import_weights(
    path: str | os.PathLike[str],
    step: Step,
    params: Any,
    *,
    key: int | Tensor = 0,
    rename: Rename | None = None,
    strict: bool = True,
) -> State:
    """Return the initial state of a step, as from `step.init`, with parameters and buffers from a file.

    Where ranks share the state, all of them call this, and each reads what it will hold.

    Args:
        path: a safetensors file; a directory of them with its index, as Hugging Face has it; or a state
            dict written by `torch.save`, read without running code from it.
        step: the step that will train.
        params: the argument of `step.init`: tensors, `meta` tensors or a recipe. It gives structure and device only.
        key: the seed of the run.
        rename: from names in the file to parameter names: a function, or a mapping of those that differ.
        strict: whether parameters that are missing, unexpected or of another shape are an error. If not, missing ones
            are initialised by `step.init`, others ignored, and a `StorageWarning` lists all of them. Other dtypes are
            cast, and buffers may be missing.

    Raises `StorageError`, on every rank if on any.
    """
    options = MatchOptions(strict=strict, params_only=True, foreign=True)
    open_ = lambda: foreign.weights(check_path(path, "path"))
    return _import("import_weights", open_, step, params, options, rename, key)[0]


@torch.inference_mode(False)
def import_deepspeed(
    dir: str | os.PathLike[str],
    step: Step,
    params: Any,
    *,
    tag: str | None = None,
    key: int | Tensor = 0,
    rename: Rename | None = None,
) -> tuple[State, dict[str, Any]]:
    """Read a checkpoint directory of DeepSpeed: ZeRO stage 0 to 3 on any number of ranks, and pipelines.

    Returns a state that continues the run (master weights, optimizer state, counters, the dynamic loss scale), and
    those entries of DeepSpeed's `client_state` that are JSON. What DeepSpeed does not save is initialised by
    `step.init`. Only tensors and plain values are read, and no code from the files is run. Where ranks share the state,
    all of them call this, and each reads what it will hold.

    Args:
        dir: the directory that was passed to `save_checkpoint`.
        step: the step that continues the run, with its optimizer.
        params: the argument of `step.init`: tensors, `meta` tensors or a recipe. It gives structure and device only.
        tag: which checkpoint; by default the one that `latest` names.
        key: the seed from here on; DeepSpeed's generator states are not imported.
        rename: from DeepSpeed's parameter names to those of the step: a function, or a mapping of those that differ.

    Raises `StorageError`, on every rank if on any.
    """
    options = MatchOptions(slots=("init", "drop"), foreign=True)
    open_ = lambda: foreign.deepspeed(check_path(dir, "dir"), tag)
    return _import("import_deepspeed", open_, step, params, options, rename, key)


@torch.inference_mode(False)
def import_dcp(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    step: Step,
    params: Any,
    *,
    model: str | None = None,
    optimizer: str | None = None,
    without_optimizer: bool = False,
    strict: bool = True,
    key: int | Tensor = 0,
    rename: Rename | None = None,
) -> tuple[State, dict[str, Any]]:
    """Read a checkpoint of `torch.distributed.checkpoint` (DCP), as FSDP2 runs write it, on any number of ranks.

    Returns a state that continues the run (parameters, buffers, the optimizer's moments, the updates that it counts),
    and all else in it that is JSON: the optimizer's `param_groups` with its rates, and what the script saved beside.
    The state dict may come from `get_model_state_dict` and `get_optimizer_state_dict`, flat or not, or from
    `state_dict` of the module and the optimizer. Where ranks share the state, all of them call this, and each reads the
    bytes of what it will hold. No code from the files is run, as torch's own reader does.

    Args:
        path: the folder of a checkpoint, the one with `.metadata`; or several, of which one has the model, another the
            optimizer, as `accelerate` writes them.
        step: the step that continues the run, with its optimizer. Its learning rate and other constants are its own.
        params: the argument of `step.init`: tensors, `meta` tensors or a recipe. It gives structure and device only.
        model: where the model's tensors are in the state dict that was saved, keys with dots between, "" for the top;
            None finds them.
        optimizer: the same of the optimizer's state.
        without_optimizer: leave the optimizer's state and counts as `step.init` makes them.
        strict: as of `import_weights`. Buffers may be missing; those that the step lacks are left out, where an
            optimizer in the checkpoint tells them from parameters.
        key: the seed from here on.
        rename: from names in the checkpoint to those of the step: a function, or a mapping of those that differ. They
            are without `_orig_mod` of torch.compile and the wrappers of activation checkpointing; without `rename` a
            `module.` of DDP is left out too, where the step has no such names.

    Warns (`UserWarning`) of optimizer state that is left out, such as that of numbered parameters whose names nothing
    tells. Raises `StorageError`, on every rank if on any, for a checkpoint that is missing, unfinished, damaged or of
    another program or model, and where parameters have had different numbers of updates.
    """
    ranks = Ranks.of(step, "import_dcp")
    with ranks.together():
        folders = _folders(path)
        flags, texts = (without_optimizer, strict), (model, optimizer)
        if not (all(is_a(x, bool) for x in flags) and all(x is None or is_a(x, str) for x in texts)):
            got = f"{model=}, {optimizer=}, {without_optimizer=}, {strict=}"[:120]
            raise refusal(
                "import_dcp takes other values", "import_dcp", got, 'keys as "app.model", or None; and booleans'
            )
        parts = parts_of(step.structure(params), ranks)
    names = AllLeaves.of(parts, ranks).leaves.keys() | parts.keys()

    def is_param(name: str) -> bool:
        new = name if rename is None else rename.get(name, name) if isinstance(rename, Mapping) else rename(name)
        return f"params.{new}" in names

    options = MatchOptions(slots=("init", "drop"), strict=strict, without_optimizer=without_optimizer, foreign=True)
    open_ = lambda: foreign.dcp(folders, model, optimizer, skip=without_optimizer, is_param=is_param)
    return _import("import_dcp", open_, step, params, options, rename, key)


def _folders(path: Any) -> list[Path]:
    """Return the argument `path` of `import_dcp` as paths. Raises `StorageError` for anything else."""
    listed = path if is_a(path, list | tuple) and path else [path]
    return [check_path(x, "path") for x in listed]


def _import(
    doing: str,
    open_: Callable[[], Source],
    step: Step,
    params: Any,
    options: MatchOptions,
    rename: Rename | None,
    key: int | Tensor,
) -> tuple[State, dict[str, Any]]:
    ranks = Ranks.of(step, doing)
    with ranks.together():
        if not (rename is None or is_a(rename, Mapping) or callable(rename)):
            want = "a function from old to new name, or a mapping of those that differ"
            raise refusal(f"{doing} takes new names", "rename", repr(rename)[:80], want)
        source = open_()
        source = source if rename is None else foreign.renamed(source, rename)
    return fill(source, step, params, options, ranks, key), source.extra
