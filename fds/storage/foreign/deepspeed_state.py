"""The state of DeepSpeed's optimizers: float32 masters and slots by parameter, of one pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import StorageError
from fds.storage.foreign.deepspeed_files import StageFiles
from fds.storage.foreign.foreign_leaf import ForeignLeaf, joined, whole
from fds.storage.foreign.optimizer_order import match
from fds.storage.foreign.torch_files import open_torch
from fds.storage.foreign.zero_layouts import Shapes, shapes_by_slice, sharded, sliced

SLOTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum")  # with the same meaning in fds.optim


@attrs.frozen(eq=False)
class OptimizerState:
    """Masters and slots of an optimizer's parameters, and notes of what is left out."""

    masters: dict[str, ForeignLeaf] = attrs.field(factory=dict)
    slots: dict[str, dict[str, ForeignLeaf]] = attrs.field(factory=dict)  # slot -> parameter name
    updates: set[int] = attrs.field(factory=set)  # counted by the optimizer itself
    notes: list[str] = attrs.field(factory=list)

    def add(self, names: Sequence[str], state: Mapping[str, Any], make: Any) -> None:
        """Add a group's state, of which `make(slot)` returns the leaves by name."""
        if "step" in state:
            self.updates.add(int(state["step"]))
        slots = [slot for slot, x in state.items() if isinstance(x, Tensor) and x.dim() and slot != "step"]
        for slot in slots:
            squares_alone = slot == "exp_avg_sq" and "exp_avg" not in slots  # DeepSpeed's Adagrad on the CPU
            into = "sum" if squares_alone else slot
            if into in SLOTS:
                self.slots.setdefault(into, {}).update({n: x for n, x in make(slot).items() if n in names})
            elif (note := f"left out: {slot} of the optimizer") not in self.notes:
                self.notes.append(note)


def by_zero(stage: StageFiles, params: Shapes, where: str) -> OptimizerState:
    """Return the sliced state of ZeRO 1 to 3, or of the optimizer of bfloat16."""
    states = [one["optimizer_state_dict"] for one in stage.slices]
    for state in states:
        counts = state["partition_count"]
        if (max(counts) if isinstance(counts, list) else counts) != len(states):
            raise StorageError(
                "files of the checkpoint are missing, or left over from another",
                where=where,
                got=f"{len(states)} files *_optim_states.pt",
                want=str(counts)[:80],
            )
    three = "fp32_flat_groups" in states[0]
    layout = sharded if three else sliced
    flats = [state["fp32_flat_groups" if three else "single_partition_of_fp32_groups"] for state in states]
    groups = stage.models[0]["param_shapes"]
    groups = groups or shapes_by_slice([state["param_slice_mappings"] for state in states], params, where)
    inner = [_by_group(state["optimizer_state_dict" if three else "base_optimizer_state"]) for state in states]
    result = OptimizerState()
    for i, group in enumerate(groups):
        shapes = {name: tuple(shape) for name, shape in group.items()}
        held = [rank[i] if i < len(rank) else {} for rank in inner]
        result.masters.update(layout(shapes, [rank[i] for rank in flats], f"{where}: parameters"))
        make = lambda slot, shapes=shapes, held=held: layout(shapes, [one[slot] for one in held], f"{where}: {slot}")
        result.add(tuple(shapes), held[0], make)
    return result


def by_name(folder: Path, shapes: Shapes) -> OptimizerState:
    """Return the state in a universal checkpoint: a folder per parameter, a file per slot."""
    result = OptimizerState()
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        name = place.name
        if name not in shapes:
            raise StorageError("a parameter of the optimizer is not in the model", where=str(place))
        found = {path.stem: open_torch(path) for path in sorted(place.glob("*.pt"))}
        leaves = {slot: x["param"] if isinstance(x, dict) else x for slot, x in found.items()}
        kept = {slot: _reshaped(x, shapes[name], f"{place}: {slot}") for slot, x in leaves.items() if slot != "step"}
        result.masters[name] = kept.pop("fp32")
        result.add(
            (name,),
            {slot: x for slot, x in leaves.items() if slot != "fp32"},
            lambda slot, name=name, kept=kept: {name: kept[slot]},
        )
    return result


def by_number(state: Mapping[str, Any], params: Mapping[str, Tensor], where: str) -> OptimizerState:
    """Return the state of an optimizer without ZeRO: torch's, or a wrapper of it with float32 masters."""
    inner = state.get("optimizer_state_dict", state)
    groups, states, result = inner["param_groups"], inner["state"], OptimizerState()
    if "fp32_groups_flat" in state:  # one flat tensor per group, which is torch's only parameter
        return _by_flat_group(state["fp32_groups_flat"], _by_group(inner), params, where)
    numbers = [i for group in groups for i in group["params"]]
    held = [states.get(i, {}) for i in numbers]
    masters = [x for group in state["fp32_groups"] for x in group] if "fp32_groups" in state else None
    shapes = [_shape(one) for one in held] if masters is None else [tuple(x.shape) for x in masters]
    names = match(groups, shapes, params, masters)
    if names is None:
        result.notes.append("left out: the optimizer's state, which does not name its parameters")
        return result
    for i, name in enumerate(names):
        if masters is not None:
            result.masters[name] = whole(masters[i], f"{where}: {name}")
        make = lambda slot, i=i, name=name: {name: whole(held[i][slot], f"{where}: {slot}.{name}")}
        result.add((name,), held[i], make)
    return result


def _by_flat_group(flats: Sequence[Tensor], held: list, params: Mapping[str, Tensor], where: str) -> OptimizerState:
    result = OptimizerState()
    if len(flats) != 1 or flats[0].numel() != sum(p.numel() for p in params.values()):
        result.notes.append("left out: float32 masters and the optimizer's state, which do not name their parameters")
        return result
    ends = list(accumulate(p.numel() for p in params.values()))

    def cut(flat: Tensor, slot: str) -> dict[str, ForeignLeaf]:
        return {
            name: joined(tuple(p.shape), [flat.detach()[end - p.numel() : end]], f"{where}: {slot}.{name}")
            for (name, p), end in zip(params.items(), ends, strict=True)
        }

    result.masters.update(cut(flats[0], "parameters"))
    result.add(tuple(params), held[0], lambda slot: cut(held[0][slot], slot))
    return result


def _by_group(state: Any) -> list[Mapping[str, Any]]:
    """Return the state of each flat group, given as a list or as torch's numbered state."""
    if isinstance(state, list):
        return state
    return [state["state"].get(i, {}) for group in state["param_groups"] for i in group["params"]]


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    return next((tuple(x.shape) for slot, x in state.items() if isinstance(x, Tensor) and slot != "step"), None)


def _reshaped(x: Any, shape: tuple[int, ...], where: str) -> ForeignLeaf:
    """Return a tensor in its shape, which may have been saved flat and padded."""
    if isinstance(x, Tensor) and tuple(x.shape) != shape and x.dim() == 1:
        return joined(shape, [x], where)
    kept = whole(x, where)
    if kept.leaf.shape != shape:
        raise StorageError(
            "a tensor has another shape than its parameter",
            where=where,
            got=str(kept.leaf),
            want=str(torch.Size(shape)),
        )
    return kept
