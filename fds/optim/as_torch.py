"""Optimizers as torch.optim's have them in a state dict: groups of parameters, with their constants."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fds.errors import OptimizerError
from fds.optim.assembly import Rule
from fds.optim.base import Optimizer, Values

CLASSES = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}  # of the same slots and formulas


def torch_groups(
    optimizer: Optimizer, shapes: Mapping[str, Sequence[int]], step: int
) -> list[tuple[dict[str, Any], bool]]:
    """Return the groups of an optimizer as `state_dict()["param_groups"]` of torch.optim has them.

    A group has the values of all schedules at t = `step`, the names of its parameters under "params", and whatever else
    the class of torch.optim of this name has, at its defaults; of an optimizer that torch has not, its arguments alone.
    Beside each: whether torch counts the updates of its parameters, as `step`.

    Args:
        optimizer: of a step.
        shapes: of the whole trained parameters, by name.
        step: the number of updates applied.

    Raises `OptimizerError` for arguments of which torch's class knows nothing.
    """
    bound = optimizer.bound({name: tuple(shape) for name, shape in shapes.items()})
    return _groups(bound, [*shapes], bound.values(torch.tensor(step)))


def _groups(optimizer: Optimizer, names: Sequence[str], values: Values) -> list[tuple[dict[str, Any], bool]]:
    groups: list[tuple[dict[str, Any], bool]] = []
    for index, (label, member) in enumerate(optimizer.members.items()):
        at = {name: optimizer.group(name) for name in names}
        mine = [name for name, group in at.items() if (group[0] if isinstance(group, tuple) else group) == index]
        groups += _groups(member, mine, values.members[label])
    return groups if optimizer.members else [_group(optimizer, names, values)] if names else []


def _group(optimizer: Optimizer, names: Sequence[str], values: Values) -> tuple[dict[str, Any], bool]:
    rule = getattr(optimizer.update, "__self__", None)
    made = {"lr": values.lr, **values.hyper}
    made = {name: float(x) if isinstance(x, Tensor) else x for name, x in made.items()}
    if "beta1" in made:
        made["betas"] = made.pop("beta1"), made.pop("beta2")
    kind = CLASSES.get(rule.name) if isinstance(rule, Rule) else None
    if kind is None:
        return made | {"params": list(names)}, True
    assert isinstance(rule, Rule)
    class_ = getattr(torch.optim, kind)
    fixed, takes = dict(rule.call.fixed), inspect.signature(class_).parameters
    for name, usual in (("decoupled", kind == "AdamW"), ("bias_correction", True)):
        if (value := fixed.pop(name, usual)) != usual:
            raise OptimizerError(
                f"torch.optim.{kind} computes something else", where=name, got=f"{name}={value}", want=f"{name}={usual}"
            )
    made |= {name: x for name, x in fixed.items() if name in takes}
    group = class_([torch.empty(0)], **made).state_dict()["param_groups"][0]
    return group | {"params": list(names)}, kind != "SGD"
