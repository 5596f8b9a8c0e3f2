"""What a step refuses before it does anything: things that are no state, no parameters, or another step's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import attrs
import torch
from torch import Tensor

from fds import autodiff, tree
from fds.errors import FdsError, LossError, StateError
from fds.loss import Layers
from fds.state import State

P = ParamSpec("P")
R = TypeVar("R")


def graphless(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method of a step run without gradients and outside inference mode, whatever surrounds it.

    So nothing that it returns has a graph, and all of it may be trained later. Raises `FdsError` inside a transform of
    `torch.func`.
    """

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if autodiff.in_torch_func():
            raise FdsError(
                "torch.func cannot transform a step", got="a step inside grad, vmap, jvp or another transform",
                want="torch.func inside the loss, around the model", hint="for several states: call the step for each",
            )  # fmt: skip
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


def undifferentiated(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method of a step raise `FdsError` for arguments that are being differentiated: no graph leads through."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if autodiff.is_differentiated() and any(_requires_grad(x) for x in tree.leaves((args, kwargs))):
            raise FdsError(
                "no gradient flows through a step", got="a state or a batch that depends on what is differentiated",
                want="the update written out, with fds.autodiff.value_and_grad(..., create_graph=True)",
                hint="under torch.no_grad() the step is a constant",
            )  # fmt: skip
        return method(*args, **kwargs)

    return run


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


def without_graph(state: State, parts: list[Tensor]) -> tuple[State, list[Tensor]]:
    """Return a state and its parameters, none of which requires grad or was made in inference mode."""
    opt = (x for slot in state.opt.values() for x in slot.values())
    leaves = (*parts, *opt, *state.buffers.values(), *tree.leaves(state.slots), state.key)
    if not any(x.requires_grad or x.is_inference() for x in leaves):
        return state, parts
    plain = {name: tree.map(_plain, getattr(state, name)) for name in ("params", "opt", "buffers", "slots", "key")}
    return attrs.evolve(state, **plain), tree.leaves(plain["params"])


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


def _requires_grad(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _plain(x: Tensor) -> Tensor:
    return x.clone() if x.is_inference() else x.detach()
