"""What a step refuses before it does anything: things that are no state, no parameters, or another step's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fds import tree
from fds.errors import LossError, StateError
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


@contextlib.contextmanager
def intact(**held: Any) -> Iterator[None]:
    """Raise `LossError` where what runs inside writes into the tensors of these trees."""
    given = [(x, x._version) for x in tree.leaves(held) if isinstance(x, torch.Tensor) and not x.is_inference()]
    yield
    changed = {id(x) for x, version in given if x._version != version}
    if changed:
        where = ", ".join(path for path, x in tree.paths(held).items() if id(x) in changed)
        raise LossError(
            "the loss writes over what it is given", where=where, got="an in-place operation",
            want="a loss that leaves its arguments as they are",
            hint="look for inplace=True in the first layer and methods that end in _; what was written stays",
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
