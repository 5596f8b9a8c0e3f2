"""A DeepSpeed checkpoint as a source: parameters in float32, optimizer state, counters and buffers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import StorageError
from fds.storage.disk.files import refusal
from fds.storage.foreign.deepspeed_files import UNIVERSAL, Checkpoint, StageFiles, attributes, find, open_checkpoint
from fds.storage.foreign.deepspeed_state import OptimizerState, by_name, by_number, by_zero
from fds.storage.foreign.foreign_leaf import ForeignLeaf, equal, join, number, source_of, whole
from fds.storage.format.manifest import check_extra
from fds.storage.source import Source

TIED = "tied_modules."
_DEEPSPEEDS = """
module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size mp_world_size
ds_config ds_version checkpoint_parallel_dimensions universal_checkpoint_info
"""
RESERVED = frozenset(_DEEPSPEEDS.split())  # entries of a checkpoint that are not the user's


def deepspeed(dir: str | os.PathLike[str], tag: str | None = None) -> Source:
    """Open what `engine.save_checkpoint(dir, tag)` of DeepSpeed 0.19.6 wrote, with any number of ranks.

    ZeRO 0 to 3, the optimizers of float16 and bfloat16, pipelines and universal checkpoints are supported:

        params.<name>       in float32 if the run had such masters, else as in the module; shared ones under the
                            first of their names; in a pipeline "<layer>.<name>", tied ones "<key>.<name>"
        opt.<slot>.<name>   exp_avg, exp_avg_sq, momentum_buffer or sum
        buffers.<name>      of the module on the first rank
        step, calls         updates applied, and steps including skipped ones
        slots.loss_scale.*  of ZeRO's dynamic loss scale

    `extra` holds the entries of `client_state` that are JSON; `composition` says what was read and what was left out.

    Args:
        dir: the directory of the checkpoints, or the folder of one.
        tag: which checkpoint; by default the last.

    Warns (`UserWarning`) of optimizer state that is left out. Raises `StorageError` for files that are missing,
    damaged, of several saves or with classes other than DeepSpeed's, and for what is not imported: tensor parallelism,
    mixtures of experts, state on NVMe.
    """
    folder = find(Path(dir), tag)
    checkpoint = open_checkpoint(folder)
    try:
        source, lost = _assemble(checkpoint)
    except StorageError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        where, got, want = str(folder), f"{type(error).__name__}: {error}"[:200], "a checkpoint of DeepSpeed 0.19.6"
        raise refusal("a file of the checkpoint does not hold what DeepSpeed puts there", where, got, want) from error
    if lost:
        warnings.warn(f"{folder}: {'; '.join(lost)}", stacklevel=2)
    return source


@attrs.frozen(eq=False)
class ModuleTensors:
    """The tensors of a module."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    frozen: dict[str, ForeignLeaf] = attrs.field(factory=dict)  # from slices
    is_trained: bool = True  # whether the stage's optimizer trains exactly its parameters


def _assemble(checkpoint: Checkpoint) -> tuple[Source, list[str]]:
    """Return the source, and notes of optimizer state that is left out."""
    where, first = str(checkpoint.folder), checkpoint.stages[0].models[0]
    modules = list(_modules_of_stages(checkpoint)) if checkpoint.layers else [_module(checkpoint.stages[0], where)]
    trained = [_optimizer_of(checkpoint, i, module) for i, module in enumerate(modules)]
    params, buffers = dict[str, ForeignLeaf](), dict[str, ForeignLeaf]()
    slots, apart = dict[str, dict[str, ForeignLeaf]](), list[str]()
    for module, trained_here in zip(modules, trained, strict=True):
        in_module = {name: whole(x, f"{where}: {name}") for name, x in module.params.items()}
        for name, leaf in {**in_module, **module.frozen, **trained_here.masters}.items():
            if name in in_module and in_module[name].leaf.shape != leaf.leaf.shape:
                at, got, want = f"{where}: {name}", str(leaf.leaf), str(in_module[name].leaf)
                raise refusal("a parameter has another shape in the optimizer", at, got, want)
            other = params.setdefault(name.removeprefix(TIED), leaf)
            if other is not leaf and not equal(other, leaf):  # DeepSpeed ties one attribute of a layer
                apart.append(f"the stages differ in {name.removeprefix(TIED)}, taken from the first")
        buffers |= {name.removeprefix(TIED): whole(x, f"{where}: {name}") for name, x in module.buffers.items()}
        for slot, by_param in trained_here.slots.items():
            for name, leaf in by_param.items():
                slots.setdefault(slot, {}).setdefault(name.removeprefix(TIED), leaf)
    calls, skipped = _counter(first, "global_steps"), _counter(first, "skipped_steps")
    extra, dropped = _client_state(first)
    kept = {"step": number(calls - skipped, torch.int64), "calls": number(calls, torch.int64)}
    kept |= {f"params.{name}": leaf for name, leaf in params.items()}
    kept |= {f"opt.{slot}.{name}": leaf for slot, by_param in slots.items() for name, leaf in by_param.items()}
    kept |= {f"buffers.{name}": leaf for name, leaf in buffers.items()} | _loss_scale(checkpoint.stages[0])
    counted = {n for leaf in trained for n in leaf.updates} - {calls - skipped}
    notes = [f"the optimizer counts {n} updates, the run {calls - skipped}" for n in sorted(counted)]
    lost = list(dict.fromkeys(note for leaf in trained for note in leaf.notes))
    return source_of(where, kept, extra, [_title(checkpoint), *notes, *apart, *lost, *dropped]), lost


def _module(stage: StageFiles, where: str) -> ModuleTensors:
    """Return a module without a pipeline; in ZeRO 3 its parameters are empty tensors in the file."""
    first = stage.models[0]
    tensors, names = first["module"], set(first.get("buffer_names") or ())
    buffers = {name: x for name, x in tensors.items() if name in names}
    if stage.shards:
        shapes = first.get("frozen_param_shapes") or {}
        pieces = [model.get("frozen_param_fragments") or {} for model in stage.models]
        frozen = {
            name: join(tuple(shape), [fragments[name] for fragments in pieces], f"{where}: {name}")
            for name, shape in shapes.items()
        }
        return ModuleTensors({}, buffers, frozen)
    params = {name: x for name, x in tensors.items() if name not in names}
    shared, places = first.get("shared_params"), dict[tuple, str]()
    if shared is None:  # without ZeRO they are not listed; they have the same storage in the file
        for name, x in params.items():
            places.setdefault((x.data_ptr() if x.numel() else name, x.shape, x.stride()), name)
        shared = params.keys() - places.values()
    return ModuleTensors({name: x for name, x in params.items() if name not in shared}, buffers)


def _modules_of_stages(checkpoint: Checkpoint) -> Iterator[ModuleTensors]:
    """Yield the module of each stage, with the parameter names of the stage's optimizer.

    The names that a stage trains tell which layers it has; without them, layers are assigned in order. A layer without
    trained names whose parameters fit those of a tied layer is that layer, which DeepSpeed writes under its index.
    """
    names = [_names(stage) for stage in checkpoint.stages]
    everything = {name for trains in names for name in trains}
    buffers = {name for stage in checkpoint.stages for name in stage.models[0].get("buffer_names") or ()}
    tied: dict[str, dict[str, int]] = {}  # by key: what is trained of the layer
    for name, size in (pair for trained in names for pair in trained.items()):
        if name.startswith(TIED):
            key, _, rest = name.removeprefix(TIED).partition(".")
            tied.setdefault(key, {})[rest] = size
    params, kept = dict[str, Tensor](), dict[str, Tensor]()
    for i, layer in checkpoint.layers.items():
        params_here = {name: x for name, x in layer.items() if f"{i}.{name}" not in buffers}
        prefix = f"{i}."
        if not any(prefix + name in everything for name in params_here):
            sizes = {name: x.numel() for name, x in params_here.items()}
            fits = [key for key, trained in tied.items() if trained == {n: sizes.get(n) for n in trained}]
            prefix = f"{TIED}{fits[0]}." if len(fits) == 1 else prefix
        for name, x in layer.items():
            (kept if f"{i}.{name}" in buffers or prefix + name in buffers else params).setdefault(prefix + name, x)
    if not everything:
        yield from _modules_in_order(checkpoint, params, kept)
        return
    others = {name: x for name, x in params.items() if name not in everything}  # frozen
    for i, trains in enumerate(names):
        mine = {name: x for name, x in params.items() if name in trains}
        yield ModuleTensors(mine | others, kept) if i == 0 else ModuleTensors(mine, {})


def _modules_in_order(
    checkpoint: Checkpoint, params: dict[str, Tensor], buffers: dict[str, Tensor]
) -> Iterator[ModuleTensors]:
    """Yield the modules of consecutive stages, each with as many parameters as its optimizer has."""
    sizes = []
    for stage in checkpoint.stages:
        state = stage.models[0].get("optimizer") or {}
        groups = state.get("optimizer_state_dict", state).get("param_groups", ())
        sizes.append(sum(len(group["params"]) for group in groups))
    names, fit = iter(params), sum(sizes) == len(params)
    for i, size in enumerate(sizes if fit else [len(params)] + [0] * (len(sizes) - 1)):
        yield ModuleTensors({name: params[name] for name in islice(names, size)}, {} if i else buffers, is_trained=fit)


def _names(stage: StageFiles) -> dict[str, int]:
    """Return the parameters that a stage trains, with their numbers of elements, if its files list them."""
    sizes: dict[str, int] = {}
    for group in stage.models[0].get("param_shapes") or ():
        sizes |= {name: torch.Size(shape).numel() for name, shape in group.items()}
    if not sizes:
        for slice_file in stage.slices:
            for table in slice_file["optimizer_state_dict"]["param_slice_mappings"]:
                for name, at in table.items():
                    sizes[name] = sizes.get(name, 0) + attributes(at)["numel"]
    return sizes


def _optimizer_of(checkpoint: Checkpoint, i: int, module: ModuleTensors) -> OptimizerState:
    stage, where = checkpoint.stages[i], str(checkpoint.folder)
    shapes = {name: tuple(x.shape) for name, x in module.params.items()}
    if (universal := checkpoint.folder / UNIVERSAL).is_dir():
        for model in stage.models[:1]:
            for group in model.get("param_shapes") or ():
                shapes |= {name: tuple(shape) for name, shape in group.items()}
        return by_name(universal, shapes)
    if stage.slices:
        return by_zero(stage, shapes, where)
    state = stage.models[0].get("optimizer")
    if not state or not module.is_trained:
        reason = "which does not name its parameters" if state else "which was not saved"
        return OptimizerState(notes=[f"left out: the optimizer's state, {reason}"])
    return by_number(state, module.params, where)


def _counter(model: Mapping[str, Any], name: str) -> int:
    value = model.get(name, 0)
    if type(value) is not int or not 0 <= value < 2**62:
        raise StorageError("a counter is not a count", where=name, got=repr(value)[:80], want="an integer from 0 on")
    return value


def _loss_scale(stage: StageFiles) -> dict[str, ForeignLeaf]:
    """Return the slot of `fds.loss_scale`, which follows the rule of ZeRO's dynamic scaler."""
    state = stage.slices[0]["optimizer_state_dict"] if stage.slices else {}
    scaler = attributes(state.get("loss_scaler"))
    if not scaler.get("dynamic"):
        return {}
    good_steps = scaler["cur_iter"] - scaler["last_overflow_iter"] - 1
    return {
        "slots.loss_scale.scale": number(float(scaler["cur_scale"]), torch.float64),
        "slots.loss_scale.good_steps": number(int(good_steps), torch.int64),
        "slots.loss_scale.hysteresis": number(int(scaler["cur_hysteresis"]), torch.int64),
    }


def _client_state(model: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the user's entries of the checkpoint, and a note for each that is not JSON."""
    extra, notes = dict[str, Any](), []
    for key, value in model.items():
        if key in RESERVED:
            continue
        try:
            extra |= check_extra({key: value})
        except StorageError:
            notes.append(f"left out: client_state[{key!r:.60}], a {type(value).__name__} that is not JSON")
    return extra, notes


def _title(checkpoint: Checkpoint) -> str:
    first, num_stages = checkpoint.stages[0].models[0], len(checkpoint.stages)
    config = first.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    words = [
        f"DeepSpeed {first.get('ds_version')!s:.20}",
        f"ZeRO {stage!s:.5}",
        f"{first.get('dp_world_size')!s:.10} data ranks",
    ]
    return ", ".join(words + ([f"{num_stages} pipeline stages"] if num_stages > 1 else []))
