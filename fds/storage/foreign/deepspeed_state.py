"""The state of DeepSpeed's optimizers: float32 masters and slots by parameter, of one pipeline stage.

ZeRO slices groups of parameters (ZeRO 1 and 2), or each parameter by itself (ZeRO 3); without ZeRO, torch numbers them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import StorageError
from fds.storage.disk.files import refusal
from fds.storage.foreign.deepspeed_files import StageFiles, attributes
from fds.storage.foreign.foreign_leaf import ForeignLeaf, check_tensor, join, open_torch, whole

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
    """Return the _join_slices state of ZeRO 1 to 3, or of the optimizer of bfloat16."""
    states = [of_rank["optimizer_state_dict"] for of_rank in stage.slices]
    for state in states:
        counts = state["partition_count"]
        if (max(counts) if isinstance(counts, list) else counts) != len(states):
            got, want = f"{len(states)} files *_optim_states.pt", str(counts)[:80]
            raise refusal("files of the checkpoint are missing, or left over from another", where, got, want)
    three = "fp32_flat_groups" in states[0]
    layout = _join_shards if three else _join_slices
    flats = [state["fp32_flat_groups" if three else "single_partition_of_fp32_groups"] for state in states]
    groups = stage.models[0]["param_shapes"]
    groups = groups or _find_groups([state["param_slice_mappings"] for state in states], params, where)
    inner = [_by_group(state["optimizer_state_dict" if three else "base_optimizer_state"]) for state in states]
    result = OptimizerState()
    for i, group in enumerate(groups):
        shapes = {name: tuple(shape) for name, shape in group.items()}
        of_group = [rank[i] if i < len(rank) else {} for rank in inner]
        result.masters.update(layout(shapes, [rank[i] for rank in flats], f"{where}: parameters"))
        make = lambda slot, shapes=shapes, group=of_group: layout(shapes, [x[slot] for x in group], f"{where}: {slot}")
        result.add(tuple(shapes), of_group[0], make)
    return result


def by_name(folder: Path, shapes: Shapes) -> OptimizerState:
    """Return the state in a universal checkpoint: a folder per parameter, a file per slot."""
    result = OptimizerState()
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        name = place.name
        if name not in shapes:
            raise StorageError("a parameter of the optimizer is not in the model", where=str(place))
        files = {path.stem: open_torch(path) for path in sorted(place.glob("*.pt"))}
        leaves = {slot: x["param"] if isinstance(x, dict) else x for slot, x in files.items()}
        kept = {slot: _reshape(x, shapes[name], f"{place}: {slot}") for slot, x in leaves.items() if slot != "step"}
        result.masters[name] = kept.pop("fp32")
        slots = {slot: x for slot, x in leaves.items() if slot != "fp32"}
        result.add((name,), slots, lambda slot, name=name, kept=kept: {name: kept[slot]})
    return result


def by_number(state: Mapping[str, Any], params: Mapping[str, Tensor], where: str) -> OptimizerState:
    """Return the state of an optimizer without ZeRO: torch's, or a wrapper of it with float32 masters."""
    inner = state.get("optimizer_state_dict", state)
    groups, states, result = inner["param_groups"], inner["state"], OptimizerState()
    if "fp32_groups_flat" in state:  # one flat tensor per group, which is torch's only parameter
        return _by_flat_group(state["fp32_groups_flat"], _by_group(inner), params, where)
    numbers = [i for group in groups for i in group["params"]]
    of_params = [states.get(i, {}) for i in numbers]
    masters = [x for group in state["fp32_groups"] for x in group] if "fp32_groups" in state else None
    shapes = (
        [_shape(param_state) for param_state in of_params] if masters is None else [tuple(x.shape) for x in masters]
    )
    names = find_names(groups, shapes, params, masters)
    if names is None:
        result.notes.append("left out: the optimizer's state, which does not name its parameters")
        return result
    for i, name in enumerate(names):
        if masters is not None:
            result.masters[name] = whole(masters[i], f"{where}: {name}")
        make = lambda slot, i=i, name=name: {name: whole(of_params[i][slot], f"{where}: {slot}.{name}")}
        result.add((name,), of_params[i], make)
    return result


def _by_flat_group(flats: Sequence[Tensor], states: list, params: Mapping[str, Tensor], where: str) -> OptimizerState:
    result = OptimizerState()
    if len(flats) != 1 or flats[0].numel() != sum(p.numel() for p in params.values()):
        result.notes.append("left out: float32 masters and the optimizer's state, which do not name their parameters")
        return result
    ends = list(accumulate(p.numel() for p in params.values()))

    def cut(flat: Tensor, slot: str) -> dict[str, ForeignLeaf]:
        return {
            name: join(tuple(p.shape), [flat.detach()[end - p.numel() : end]], f"{where}: {slot}.{name}")
            for (name, p), end in zip(params.items(), ends, strict=True)
        }

    result.masters.update(cut(flats[0], "parameters"))
    result.add(tuple(params), states[0], lambda slot: cut(states[0][slot], slot))
    return result


def _by_group(state: Any) -> list[Mapping[str, Any]]:
    """Return the state of each flat group, given as a list or as torch's numbered state."""
    if isinstance(state, list):
        return state
    return [state["state"].get(i, {}) for group in state["param_groups"] for i in group["params"]]


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    return next((tuple(x.shape) for slot, x in state.items() if isinstance(x, Tensor) and slot != "step"), None)


def _reshape(x: Any, shape: tuple[int, ...], where: str) -> ForeignLeaf:
    """Return a tensor in its shape, which may have been saved flat and padded."""
    if isinstance(x, Tensor) and tuple(x.shape) != shape and x.dim() == 1:
        return join(shape, [x], where)
    kept = whole(x, where)
    if kept.leaf.shape != shape:
        raise refusal("a tensor has another shape than its parameter", where, str(kept.leaf), str(torch.Size(shape)))
    return kept


Shapes = Mapping[str, tuple[int, ...]]  # of the parameters of one group, in the group's order


def _join_slices(shapes: Shapes, ranks: Sequence[Any], where: str) -> dict[str, ForeignLeaf]:
    """Return the parameters of a group, which ZeRO 1 and 2 concatenate and divide into one slice per rank.

    After the last parameter there may be padding, up to a multiple of twice the number of ranks. Raises `StorageError`
    for slices of another length.
    """
    slices, kept, start = _flat(ranks, where), dict[str, ForeignLeaf](), 0
    for name, shape in shapes.items():
        numel, first, pieces = torch.Size(shape).numel(), 0, []
        for x in slices:
            low, high = max(start, first), min(start + numel, first + x.numel())
            if low < high or not pieces:
                pieces.append(x[max(low - first, 0) : max(high - first, 0)])
            first += x.numel()
        kept[name] = join(shape, pieces, f"{where}: {name}")
        start += numel
    have = sum(x.numel() for x in slices)
    if not start <= have < start + 2 * len(slices):
        want = f"{start}, and less than {2 * len(slices)} of padding"
        raise refusal("the slices of a group do not fit its parameters", where, f"{have} elements", want)
    return kept


def _join_shards(shapes: Shapes, ranks: Sequence[Any], where: str) -> dict[str, ForeignLeaf]:
    """Return the parameters of a group of ZeRO 3, each divided into equal slices, of which the last is padded.

    Raises `StorageError` for slices of another length.
    """
    slices, kept, start = _flat(ranks, where), dict[str, ForeignLeaf](), 0
    for name, shape in shapes.items():
        share = -(-torch.Size(shape).numel() // len(slices))
        kept[name] = join(shape, [x[start : start + share] for x in slices], f"{where}: {name}")
        start += share
    if any(x.numel() != start for x in slices):
        got = ", ".join(str(x.numel()) for x in slices)[:80]
        raise refusal("the slices of a group do not fit its parameters", where, got, f"{start} each")
    return kept


def _find_groups(ranks: Sequence[Any], shape_of: Shapes, where: str) -> list[Shapes]:
    """Return the groups of parameters from the tables of their slices, given all shapes.

    Each rank has a table per group: name -> (start, number of elements) in its slice. Raises `StorageError`.
    """
    groups: list[dict[str, int]] = [{} for _ in ranks[0]]
    for tables in ranks:
        for group, table in zip(groups, tables, strict=True):
            places = {name: attributes(at) for name, at in table.items()}
            for name in sorted(places, key=lambda name: places[name].get("start", 0)):
                group[name] = group.get(name, 0) + places[name].get("numel", 0)
    for group in groups:
        for name, numel in group.items():
            if name not in shape_of or torch.Size(shape_of[name]).numel() != numel:
                got, want = str(shape_of.get(name)), f"a tensor of {numel} elements"
                raise refusal("a parameter of the optimizer is not in the model", f"{where}: {name}", got, want)
    return [{name: shape_of[name] for name in group} for group in groups]


def _flat(ranks: Sequence[Any], where: str) -> list[Tensor]:
    flats = [check_tensor(x, where).detach() for x in ranks]
    if not flats or any(x.dim() != 1 for x in flats):
        raise refusal("a slice of a group is not flat", where, ", ".join(str(tuple(x.shape)) for x in flats))
    return flats


Shape = tuple[int, ...] | None  # None: the optimizer has no state of this parameter yet


def find_names(
    groups: Sequence[Mapping[str, Any]],
    shapes: Sequence[Shape],
    params: Mapping[str, Tensor],
    masters: Sequence[Tensor] | None,
) -> list[str] | None:
    """Return the name of each parameter of the optimizer, or None where that is not certain.

    "param_names" of its groups decides if all of them have it. `shapes` are those of its parameters, group by group;
    `params` are in the model's order; float32 `masters` round to them.

    It is certain for one group of all parameters, in the model's order; for groups of which no two have parameters of
    the same shape, and which have all parameters of each shape; and for masters that each round to one parameter.
    """
    if all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
        return names if _fit(names, shapes, params) else None
    names = list(params)
    if len(groups) == 1 and _fit(names, shapes, params):
        return names
    owner = [i for i, group in enumerate(groups) for _ in group["params"]]
    by_shape = {shape: [name for name in names if tuple(params[name].shape) == shape] for shape in shapes}
    places = {shape: [i for i, other in enumerate(shapes) if other == shape] for shape in by_shape}
    pairs = [(places[shape], by_shape[shape]) for shape in places]
    if all(len({owner[i] for i in mine}) == 1 and len(mine) == len(theirs) for mine, theirs in pairs):
        name_of = {i: name for mine, theirs in pairs for i, name in zip(mine, theirs, strict=True)}
        return [name_of[i] for i in range(len(shapes))]
    return _match_masters(masters, params) if masters is not None else None


def _fit(names: Sequence[str], shapes: Sequence[Shape], params: Mapping[str, Tensor]) -> bool:
    have = [tuple(params[name].shape) for name in names if name in params]
    return len(have) == len(shapes) and all(b is None or a == b for a, b in zip(have, shapes, strict=True))


def _match_masters(masters: Sequence[Tensor], params: Mapping[str, Tensor]) -> list[str] | None:
    """Return the parameter that each master rounds to, or None if any rounds to none or several."""
    names = []
    for master in masters:
        equal = [n for n, p in params.items() if p.shape == master.shape and torch.equal(master.to(p.dtype), p)]
        names += equal if len(equal) == 1 else [None]
    return names if None not in names and len(set(names)) == len(names) else None
