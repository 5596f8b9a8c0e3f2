"""The state of torch's optimizers in a checkpoint of torch.distributed.checkpoint: by parameter, and in groups.

It is nested, `state -> <name> -> exp_avg`, with the parameter's name or its number; or flat, `state.<name>.exp_avg`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import StorageError
from fds.storage.disk.files import refusal
from fds.storage.foreign.dcp_files import Item, Keys, SavedTensor, read_box, read_value
from fds.storage.foreign.deepspeed_state import find_names
from fds.storage.format import boxes
from fds.storage.format.manifest import check_extra

STATE, GROUPS = "state", "param_groups"
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # modules around others, in their names
DDP = "module."  # before all names of a module inside torch's DistributedDataParallel


@attrs.define(eq=False)
class OptimizerState:
    """What an optimizer has: by parameter, a name or a number, its slots; and its groups."""

    slots_of: dict[str, dict[str, SavedTensor]] = attrs.field(factory=dict)
    updates: int | None = None
    groups: list[dict[str, Any]] = attrs.field(factory=list)
    unreadable: list[str] = attrs.field(factory=list)

    @classmethod
    def of(
        cls, tensors: Mapping[Keys, SavedTensor], values: Mapping[Keys, Item], root: Keys, where: str
    ) -> OptimizerState:
        """Read the groups and the counts; slots are read later. Raises `StorageError` for counts that differ."""
        result, counts = cls(), dict[str, float]()
        for path, x in tensors.items():
            if not below(path, root) or (place := _place(path[len(root) :], STATE)) is None:
                continue
            name, slot = place
            if slot != "step":
                result.slots_of.setdefault(name, {})[slot] = x
                continue
            count = torch.empty(1, dtype=x.dtype, device="cpu")
            read_box(x, boxes.whole(x.shape), 0, count)
            counts[name] = float(count)
            result.slots_of.setdefault(name, {})
        groups: dict[str, dict[str, Any]] = {}
        for path, item in values.items():
            if not below(path, root):
                continue
            state, group = (_place(path[len(root) :], kind) for kind in (STATE, GROUPS))
            if state is not None and state[1] == "step":
                counts[state[0]] = float(read_value(item))
            elif group is not None:
                try:
                    value = check_extra({"value": plain(read_value(item))})["value"]
                    groups.setdefault(group[0], {})[group[1]] = value
                except StorageError:  # say, a function
                    result.unreadable.append(f"left out: {'.'.join(path):.80}")
        result.groups = _listed(groups)
        if counts:
            result.updates = _equal(counts, where)
        return result

    def by_parameter(
        self,
        params: Mapping[str, tuple[int, ...]],
        tensors: Mapping[str, tuple[int, ...]],
        bare: Mapping[str, str],
        where: str,
    ) -> tuple[dict[tuple[str, str], SavedTensor], set[str], list[str]]:
        """Return slots by (slot, name), the names that have state, and what is left out.

        Args:
            params: the shapes of the model's parameters by name, as far as they are known to be such.
            tensors: those of all its tensors.
            bare: their names without wrappers, by name.
            where: the path, for messages.

        Raises `StorageError` for a parameter that the model has not.
        """
        owners, lost = self._owners(params, bare), dict[str, None]()
        if owners is None:
            return {}, set(), ["left out: the optimizer's state, which does not name its parameters"]
        slots: dict[tuple[str, str], SavedTensor] = {}
        for key, table in self.slots_of.items():
            name = owners.get(key)
            if name is None:
                raise refusal("the optimizer has a parameter that the model has not", where, key[:80])
            for slot, x in table.items():
                if x.shape == tensors[name]:
                    slots[slot, name] = x
                else:
                    lost[f"left out: {slot} of the optimizer"] = None
        return slots, {name for name in owners.values() if name is not None}, [*lost]

    def _owners(self, params: Mapping[str, tuple[int, ...]], bare: Mapping[str, str]) -> dict[str, str | None] | None:
        """Return the name of each parameter; None where numbers do not tell."""
        if not all(key.isdigit() for key in self.slots_of):
            return in_model(self.slots_of, bare)
        if not self.slots_of:
            return {}
        numbers = [str(i) for group in self.groups for i in group.get("params", ())]
        have = [next(iter(self.slots_of.get(i, {}).values()), None) for i in numbers]
        blanks = {name: torch.empty(shape, device="meta") for name, shape in params.items()}
        names = find_names(self.groups, [None if x is None else x.shape for x in have], blanks, None)
        return None if names is None or {*numbers} < {*self.slots_of} else dict(zip(numbers, names, strict=True))


def in_model(keys: Iterable[str], bare: Mapping[str, str]) -> dict[str, str | None]:
    """Return by an optimizer's name of a parameter the model's, None where it has none; `bare`: without wrappers."""
    by_bare = {new: name for name, new in bare.items()}
    new = {key: unwrapped(key) for key in keys}
    return {key: by_bare.get(x, by_bare.get(x.removeprefix(DDP))) for key, x in new.items()}


def trained_keys(paths: Iterable[Keys], root: Keys, groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return an optimizer's names of the parameters that it trains: those that have state, and those in its groups."""
    places = (_place(path[len(root) :], STATE) for path in paths if below(path, root))
    return [*(place[0] for place in places if place), *(str(key) for x in groups for key in x.get("params", ()))]


def unwrapped(name: str) -> str:
    """Return a name without those of wrappers.

    >>> unwrapped("layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(word for word in name.split(".") if word not in WRAPPERS)


def below(path: Keys, root: Keys) -> bool:
    """Say whether a path leads to the state or the groups of an optimizer."""
    return path[: len(root)] == root and len(path) > len(root) and path[len(root)].partition(".")[0] in (STATE, GROUPS)


def _place(path: Keys, kind: str) -> tuple[str, str] | None:
    """Split what leads to a value of an optimizer into parameter or group and key; None where it is not of this kind.

    It may be flat: ("state.<name>.exp_avg",).
    """
    head, _, rest = path[0].partition(".")
    if head != kind:
        return None
    keys = [*filter(None, [rest]), *path[1:]]
    if len(keys) == 1:
        name, _, key = keys[0].rpartition(".")
        return (name, key) if name else None
    return (".".join(keys[:-1]), keys[-1])


def _listed(groups: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer as torch has them: a list, of dicts with `params`.

    Of a flat state dict each parameter has a group, and those with equal values are one.
    """
    if all(key.isdigit() for key in groups):
        return [groups[key] for key in sorted(groups, key=int)]
    listed: list[dict[str, Any]] = []
    for name, group in groups.items():
        same = next((x for x in listed if {k: v for k, v in x.items() if k != "params"} == group), None)
        if same is None:
            listed.append(group | {"params": [name]})
        else:
            same["params"].append(name)
    return listed


def plain(value: Any) -> Any:
    """Return a value as JSON has it: tuples as lists, tensors of one number as numbers."""
    match value:
        case Tensor() if value.numel() == 1:
            return value.item()
        case dict():
            return {str(key): plain(x) for key, x in value.items()}
        case list() | tuple():
            return [plain(x) for x in value]
    return value


def _equal(counts: Mapping[str, float], where: str) -> int:
    """Return the number of updates of all parameters. Raises `StorageError` where they differ, or are no counts."""
    least, *others = sorted({*counts.values()})
    if others or least != int(least) or least < 0:
        got = ", ".join(f"{n:g} of {name}" for name, n in list(counts.items())[:200] if n in (least, *others[-1:]))
        raise refusal(
            "parameters have had different numbers of updates, and a state counts them once", where, got[:200],
            "one number", "import_dcp(..., without_optimizer=True) begins the optimizer anew",
        )  # fmt: skip
    return int(least)
