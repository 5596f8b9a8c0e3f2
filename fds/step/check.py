"""What a step refuses before it does anything: things that are no state, no parameters, or another step's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fds.errors import StateError
from fds.loss import Layers
from fds.state import State


def usable(state: Any, doing: str) -> None:
    """Raise `StateError` for anything but a state, `DonatedStateError` for one that was given up."""
    if not isinstance(state, State):
        raise StateError(f"{doing}: this is no state", got=type(state).__name__, want="a State",
                         hint="what step.init(params), fds.load or a step returned")  # fmt: skip
    state.check(doing)


def same_composition(state: State, slots: Iterable[str], opt: Mapping[str, Iterable[str]]) -> None:
    """Raise `StateError` unless a state has these slots, and in `opt` these names under these slots."""
    parts = [("slots", state.slots, slots), ("opt", state.opt, opt)]
    parts += [(f"opt.{slot}", state.opt.get(slot, {}), names) for slot, names in opt.items()]
    for where, got, want in parts:
        if got.keys() != set(want):
            raise StateError(
                "the state is another composition's", where=where, got=", ".join(got) or "nothing",
                want=", ".join(want) or "nothing", hint="make the state with the init of this step, or carry it over: "
                "step.init(other_step.params(state))",
            )  # fmt: skip


def parameters(params: Any) -> None:
    """Raise `StateError` for a module or a loss in place of the parameters that `step.init` takes."""
    if isinstance(params, Layers):
        raise StateError("layers are a loss, not parameters", got="layers", want="layers.init")
    if isinstance(params, torch.nn.Module):
        raise StateError(
            "a module is no tree of parameters", got=type(params).__name__, want="a pytree of tensors, or a recipe",
            hint="apply, params, buffers = fds.functional(module)",
        )  # fmt: skip
