"""The files of a DeepSpeed checkpoint."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import attrs

from fds.errors import StorageError
from fds.storage.disk.files import read_small, refusal
from fds.storage.foreign.foreign_leaf import Inert, open_torch

# The classes that DeepSpeed pickles. Their objects are read as attributes without behaviour.
CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
UNIVERSAL = "zero"  # the folder of a checkpoint's optimizer state by parameter, after ds_to_universal.py
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL_SLICE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_SLICE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERTS = re.compile(r".*expert_\d+_.*\.pt|expp_rank_.*\.pt")


@attrs.frozen(eq=False)
class StageFiles:
    """The files of one pipeline stage, or the only one: a dict per file, in the order of the data ranks."""

    models: tuple[dict[str, Any], ...]  # one; in ZeRO 3 one per data rank
    slices: tuple[dict[str, Any], ...]  # of the optimizer, one per data rank; empty without ZeRO
    shards: bool  # whether parameters are in slices too, as in ZeRO 3


@attrs.frozen(eq=False)
class Checkpoint:
    """The contents of the files of one tag."""

    folder: Path
    stages: tuple[StageFiles, ...]
    layers: dict[int, dict[str, Any]]  # of a pipeline: state dicts by index


def find(dir: Path, tag: str | None) -> Path:
    """Return the folder of a tag, by default the last. Raises `StorageError`."""
    if tag is None and any(_MODEL.fullmatch(p.name) or _MODEL_SLICE.fullmatch(p.name) for p in dir.glob("*.pt")):
        return dir
    if tag is None:
        latest = next((p for p in (dir / "latest", dir / "latest_universal") if p.exists()), dir / "latest")
        try:
            tag = read_small(Path(os.path.realpath(latest)), 1000).decode().strip()
        except (OSError, UnicodeError) as error:
            want = "the file `latest` in it, or tag=..."
            raise refusal("this is not a directory of DeepSpeed's checkpoints", str(dir), str(error), want) from error
    if not isinstance(tag, str) or not tag or "\0" in tag or os.path.isabs(tag) or ".." in Path(tag).parts:
        raise StorageError("not a tag", where=str(dir), got=repr(tag)[:80], want="the name of a folder in it")
    if not (dir / tag).is_dir():
        tags = sorted(p.name for p in dir.iterdir() if p.is_dir()) if dir.is_dir() else []
        where = str(dir)
        raise refusal("there is no checkpoint under this tag", where, repr(tag)[:80], "one of " + ", ".join(tags[:20]))
    return dir / tag


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open every file of a checkpoint; tensors are mapped, not read.

    Raises `StorageError` for files that are missing, damaged or left over from another save, and for checkpoints of
    tensor parallelism, experts and state that was offloaded to NVMe.
    """
    names = sorted(os.listdir(folder))
    _check_supported(folder, names)
    models, slices, layers = dict[tuple, str](), dict[tuple, str](), dict[int, str]()
    for name in names:
        if match := _MODEL.fullmatch(name):
            _put(models, (int(match[1]), 0), name, folder)
        elif match := _MODEL_SLICE.fullmatch(name):
            _put(models, (int(match[2]), int(match[1])), name, folder)
        elif match := _OPTIMIZER_SLICE.fullmatch(name):
            _put(slices, (int(match[2]), int(match[1])), name, folder)
        elif match := _LAYER.fullmatch(name):
            _put(layers, int(match[1]), name, folder)
    num_stages = _count({stage for stage, _ in models}, folder, "mp_rank_{:02d}_model_states.pt")
    opened = {name: _dict(folder / name) for name in (*models.values(), *slices.values(), *layers.values())}
    stages = []
    for stage in range(num_stages):
        files = [{rank: name for (at, rank), name in by_place.items() if at == stage} for by_place in (models, slices)]
        for by_rank, form in zip(files, ("model", "optim"), strict=True):
            _count(set(by_rank), folder, f"zero_pp_rank_{{}}_mp_rank_{stage:02d}_{form}_states.pt")
        ordered = [tuple(opened[name] for _, name in sorted(by_rank.items())) for by_rank in files]
        stages.append(StageFiles(*ordered, shards=any(_MODEL_SLICE.fullmatch(name) for name in files[0].values())))
    checkpoint = Checkpoint(folder, tuple(stages), {i: opened[name] for i, name in sorted(layers.items())})
    _check_complete(checkpoint)
    return checkpoint


def attributes(x: Any) -> dict[str, Any]:
    """Return the attributes of an object of one of `CLASSES`."""
    return vars(x) if isinstance(x, Inert) else {}


def _put(files: dict, place: Any, name: str, folder: Path) -> None:
    if place in files:
        hint = "one was left by an earlier save under this tag"
        raise refusal("two files are of the same rank or layer", str(folder), f"{files[place]} and {name}", "one", hint)
    files[place] = name


def _count(indices: set[int], folder: Path, form: str) -> int:
    """Return the number of indices, which must count from 0 without a gap."""
    for i in range(max(indices, default=-1) + 1):
        if i not in indices:
            raise StorageError("a file of the checkpoint is missing", where=str(folder / form.format(i)))
    return len(indices)


def _dict(path: Path) -> dict[str, Any]:
    content = open_torch(path, CLASSES)
    if not isinstance(content, dict):
        raise StorageError("a file of the checkpoint does not hold a dict", where=str(path), got=type(content).__name__)
    return content


def _check_supported(folder: Path, names: list[str]) -> None:
    experts = [name for name in names if _EXPERTS.fullmatch(name)]
    split = [name for name in names if (match := _LAYER.fullmatch(name)) and int(match[2] or 0) > 0]
    for what, got in (
        ("mixtures of experts are not imported", experts),
        ("tensor parallelism is not imported", split),
        ("state on NVMe is not imported", [n for n in names if n == "offloaded_tensors"]),
    ):
        if got:
            raise StorageError(what, where=str(folder), got=", ".join(got[:3]))
    if not any(_MODEL.fullmatch(name) or _MODEL_SLICE.fullmatch(name) for name in names):
        want, hint = "files *_model_states.pt", "it is in the folders below: tag=..." if "latest" in names else ""
        raise refusal("there is no DeepSpeed checkpoint here", str(folder), ", ".join(names[:5]), want, hint)


def _check_complete(checkpoint: Checkpoint) -> None:
    where, first = str(checkpoint.folder), checkpoint.stages[0].models[0]
    dims = first.get("checkpoint_parallel_dimensions")
    split = dims.get("tp_degree", 1) if isinstance(dims, dict) else 1
    if split not in (1, None) or (len(checkpoint.stages) > 1 and not checkpoint.layers):
        got = f"tp_degree {split}, {len(checkpoint.stages)} files mp_rank_*"
        raise refusal("tensor parallelism is not imported", where, got)
    if "ds_autoep_layers" in first or "autoep_layers" in first or first.get("num_experts"):
        raise StorageError("mixtures of experts are not imported", where=where)
    for i, stage in enumerate(checkpoint.stages):
        for key, num in (("pp_degree", len(checkpoint.stages)), ("dp_world_size", len(stage.slices) or None)):
            stated = dims.get(key) if key == "pp_degree" and isinstance(dims, dict) else stage.models[0].get(key)
            if type(stated) is int and num is not None and stated != num:
                got = f"{num} of {key}, at stage {i}"
                raise refusal("files of the checkpoint are missing, or left over from another", where, got, str(stated))
        universal = (checkpoint.folder / UNIVERSAL).is_dir()  # its slices were merged
        if len(stage.models) not in (1, len(stage.slices)) and not universal:
            got = f"{len(stage.models)} of the model, {len(stage.slices)} of the optimizer"
            raise refusal("files of the checkpoint are missing, or left over from another", where, got)
