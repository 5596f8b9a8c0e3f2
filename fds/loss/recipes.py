"""Recipes: initialize the parameters of a run from a key, one layer at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import cast

import attrs
import torch
from torch import Tensor, nn

from fds import random
from fds.errors import LossError
from fds.loss.record import Window
from fds.loss.recorder import record


@attrs.frozen(eq=False)
class Recipe:
    """A function `key -> params` that can also return only the shapes, or the parameters in pieces.

    Attributes:
        trace: `trace() -> params` on `meta`: nothing is allocated or drawn.
        pieces: `pieces(key, wanted)` yields `{name: tensor}`, one layer at a time, in the order of the trace. Layers
            for which `wanted(name)` is false for every name are skipped, unless they were passed as built modules.
        given: names of parameters of modules that were passed built; their values may differ between ranks.
    """

    trace: Callable[[], dict[str, Tensor]]
    pieces: Callable[..., Iterator[dict[str, Tensor]]]
    given: frozenset[str] = frozenset()

    def __call__(self, key: Tensor) -> dict[str, Tensor]:
        """Return all parameters, in the order of the trace."""
        return {name: x for piece in self.pieces(key) for name, x in piece.items()}


def every(name: str) -> bool:
    """Return True: the default `wanted` of `Recipe.pieces`."""
    return True


def recipe(module_factory: Callable[[], nn.Module]) -> Recipe:
    """Make a function `key -> params` from one that builds a module: `step.init(fds.recipe(GPT), key=0)`.

    Names are those of `named_parameters`. The factory runs on `meta`, and its tensor operations are recorded. They are
    then replayed for the parameters of one submodule after another, on the devices that the factory chose. The draw
    with index i is seeded by the key and i: values have the distribution that the factory chose, but are not those of
    `torch.manual_seed`. Memory that is never written is zero. Python's and NumPy's global generators are seeded from
    the key as well; every generator is restored.

    If operations of the factory cannot be recorded, the module is built for real, as a whole, seeded from the key. That
    is so if it seeds torch's generator or passes its own, calls `.numpy()`, indexes with a boolean mask, loads a file
    with `torch.load`, or uses operations without a shape function. Values that it reads (`.item()`,
    `if (w > 0).all():`) are computed on the way, at the cost of running their operations twice. A tensor that every
    parameter is derived from is computed again for every submodule.

    `trace`, `pieces` and the call raise what the factory raises, and `LossError` if it does not return a module;
    `recipe` raises `LossError` if it is passed a module.
    """
    if isinstance(module_factory, nn.Module) or not callable(module_factory):
        raise LossError(
            "a recipe needs a function that builds a module",
            got=type(module_factory).__name__,
            want="fds.recipe(lambda: nn.Linear(3, 2))",
            hint="the parameters of a module that is built: fds.functional(module)",
        )

    def pieces(key: Tensor, wanted: Callable[[str], bool] = every) -> Iterator[dict[str, Tensor]]:
        with random.python_seeded(key):
            recording = record(module_factory, key)
        if recording is None:
            yield _built(module_factory, key)
            return
        operations, params = recording
        del recording
        for _, group in itertools.groupby(params, lambda name: name.rpartition(".")[0]):
            names = list(group)
            if not any(map(wanted, names)):
                continue
            windows = {name: w for name in names if isinstance(w := params[name], Window)}
            piece = dict(zip(windows, operations.replay(windows.values(), key), strict=True))
            piece = {name: piece[name] if name in piece else params[name] for name in names}
            yield {name: cast(Tensor, piece.pop(name)) for name in names}  # popped: nothing here holds them afterwards

    def trace() -> dict[str, Tensor]:
        key = random.key(0)
        with torch.device("cpu"):  # whatever the device in force, nothing is allocated there
            with random.python_seeded(key):
                recording = record(module_factory, key)
            params = _built(module_factory, key) if recording is None else recording[1]
        return {name: _shape(x) for name, x in params.items()}

    return Recipe(trace, pieces)


def _built(module_factory: Callable[[], nn.Module], key: Tensor) -> dict[str, Tensor]:
    """Return the parameters of a module that is built for real."""
    with random.python_seeded(key), random.seeded(key):
        module = module_factory()
        if not isinstance(module, nn.Module):
            raise LossError(
                "a recipe needs a function that builds a module",
                got=type(module).__name__,
                want="fds.recipe(lambda: nn.Linear(3, 2))",
            )
        return {name: p.detach() for name, p in module.named_parameters()}


def _shape(x: Tensor | Window) -> Tensor:
    if isinstance(x, Tensor):
        return x.to("meta")
    return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta")
