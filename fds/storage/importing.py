"""Import: begin or go on with what others wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fds.state import State
from fds.step import Step
from fds.storage import foreign
from fds.storage.disk.paths import checked_path
from fds.storage.loading import fill
from fds.storage.matching import Options
from fds.storage.ranks.together import Ranks
from fds.storage.source import Source

Rename = Callable[[str], str] | Mapping[str, str]


@torch.inference_mode(False)
def import_weights(
    path: str | os.PathLike,
    step: Step,
    params: Any,
    *,
    key: int | Tensor = 0,
    rename: Rename | None = None,
    strict: bool = True,
) -> State:
    """Return the first state of a step, as `step.init` makes it, with parameters and buffers from a file.

    Where ranks share the state, all of them call this, and each reads what it will hold.

    Args:
        path: a safetensors file; a directory of them with its index, as Hugging Face has it; or what `torch.save`
            made of a state dict, read without running anything that is in it.
        step: the step that will train.
        params: what `step.init` would take: tensors, `meta` tensors or a recipe. Only structure is read, and device.
        key: where all randomness of the run starts.
        rename: from names in the file to parameter names: a function, or a mapping of those that differ.
        strict: whether a parameter that the file lacks, has beyond these, or has in another shape is refused. If not,
            it is as `step.init` makes it, or left alone, and a `StorageWarning` lists all of them. Other dtypes are
            cast, and buffers may be missing.

    Raises `StorageError`, on every rank if on any.
    """
    options = Options(strict=strict, params_only=True, foreign=True)
    open_ = lambda: foreign.weights(checked_path(path, "path"))
    return _filled("import_weights", open_, step, params, options, rename, key)[0]


@torch.inference_mode(False)
def import_deepspeed(
    dir: str | os.PathLike,
    step: Step,
    params: Any,
    *,
    tag: str | None = None,
    key: int | Tensor = 0,
    rename: Rename | None = None,
) -> tuple[State, dict[str, Any]]:
    """Read a checkpoint directory of DeepSpeed: ZeRO stage 0 to 3 on any number of ranks, and pipelines.

    Returns the state with which the run goes on (master weights, what the optimizer remembers, counters, the dynamic
    loss scale), and DeepSpeed's `client_state` as far as it is JSON. What DeepSpeed does not keep is as `step.init`
    makes it. Only tensors and plain values are read: nothing that is in the files is run. Where ranks share the state,
    all of them call this, and each reads what it will hold.

    Args:
        dir: what `save_checkpoint` was given.
        step: the step that will go on, with the optimizer of the run.
        params: what `step.init` would take: tensors, `meta` tensors or a recipe. Only structure is read, and device.
        tag: which checkpoint; by default the one that `latest` names.
        key: where all randomness starts from here on: DeepSpeed's generators are not carried over.
        rename: from DeepSpeed's parameter names to those of the step: a function, or a mapping of those that differ.

    Raises `StorageError`, on every rank if on any.
    """
    options = Options(slots=("init", "drop"), foreign=True)
    open_ = lambda: foreign.deepspeed(checked_path(dir, "dir"), tag)
    return _filled("import_deepspeed", open_, step, params, options, rename, key)


def _filled(
    doing: str, open_: Callable[[], Source], step: Step, params: Any, options: Options, rename: Rename | None,
    key: int | Tensor,
) -> tuple[State, dict[str, Any]]:
    ranks = Ranks.of(step, doing)
    with ranks.together():
        source = open_()
        source = source if rename is None else foreign.renamed(source, rename)
    return fill(source, step, params, options, ranks, key), source.extra
