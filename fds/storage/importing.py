"""Import weights, and DeepSpeed's checkpoints."""

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
from fds.storage.matching import MatchOptions
from fds.storage.ranks.exchange import Ranks
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
    open_ = lambda: foreign.weights(checked_path(path, "path"))
    return _filled("import_weights", open_, step, params, options, rename, key)[0]


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
    open_ = lambda: foreign.deepspeed(checked_path(dir, "dir"), tag)
    return _filled("import_deepspeed", open_, step, params, options, rename, key)


def _filled(
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
        source = open_()
        source = source if rename is None else foreign.renamed(source, rename)
    return fill(source, step, params, options, ranks, key), source.extra
