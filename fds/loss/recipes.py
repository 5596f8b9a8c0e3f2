"""Recipes: how to make the parameters of a run from a key, a layer at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import attrs
import torch
from torch import Tensor, nn

from fds import random
from fds.errors import LossError
from fds.loss.record import Window
from fds.loss.recorder import record


@attrs.frozen(eq=False)
class Recipe:
    """A function `key -> params` that also says what it would make, and makes it in pieces.

    Attributes:
        trace: `trace() -> params` on `meta`: nothing is allocated or drawn.
        pieces: `pieces(key, wanted)` yields `{name: tensor}`, a layer at a time, in the order of the trace; layers of
            which `wanted(name)` is false for every name are not made, but for those that were given built.
        given: names of parameters that were given built: ranks may have other values.
    """

    trace: Callable[[], dict[str, Tensor]]
    pieces: Callable[..., Iterator[dict[str, Tensor]]]
    given: frozenset[str] = frozenset()

    def __call__(self, key: Tensor) -> dict[str, Tensor]:
        """Return all parameters, in the order of the trace."""
        return {name: x for piece in self.pieces(key) for name, x in piece.items()}


def every(name: str) -> bool:
    """Want the parameter of this name, whatever it is."""
    return True


def recipe(module_factory: Callable[[], nn.Module]) -> Recipe:
    """Make `key -> params` of a function that builds a module: for `step.init(fds.recipe(GPT), key=0)`.

    Names are those of `named_parameters`. The factory runs on `meta`, where what it does to tensors is recorded; then
    the operations behind the parameters of one submodule are done for real, those of the next, and so on, on the
    devices where the factory would have done them. Draw number i is seeded by the key and i: values have the
    distribution that the factory gives them, not the numbers that `torch.manual_seed` would. What is never written is
    zero. Python's and NumPy's global generators are seeded from the key as well; every generator is restored.

    A factory whose operations cannot be recorded is built for real, whole, in one piece, seeded from the key: one that
    seeds torch's generator or passes its own, calls `.numpy()`, indexes with a boolean mask, loads a file with
    `torch.load`, or uses operations without a shape function. Values that it reads (`.item()`, `if (w > 0).all():`)
    are made on the way, and cost their operations once more. A tensor that every parameter is derived from is made
    again for every submodule.

    `trace`, `pieces` and the call raise what the factory raises, and `LossError` where it returns no module; `recipe`
    itself where it is given one.
    """
    if isinstance(module_factory, nn.Module) or not callable(module_factory):
        raise LossError("a recipe needs a function that builds a module", got=type(module_factory).__name__,
                        want="fds.recipe(lambda: nn.Linear(3, 2))",
                        hint="the parameters of a module that is built: fds.functional(module)")  # fmt: skip

    def pieces(key: Tensor, wanted: Callable[[str], bool] = every) -> Iterator[dict[str, Tensor]]:
        with random.python_seeded(key):
            found = record(module_factory, key)
        if found is None:
            yield _built(module_factory, key)
            return
        recorded, params = found
        del found
        for _, group in itertools.groupby(params, lambda name: name.rpartition(".")[0]):
            names = list(group)
            if not any(map(wanted, names)):
                continue
            windows = {name: w for name in names if isinstance(w := params[name], Window)}
            piece = dict(zip(windows, recorded.replay(windows.values(), key), strict=True))
            piece = {name: piece[name] if name in piece else params[name] for name in names}
            yield {name: piece.pop(name) for name in names}  # type: ignore[misc]

    def trace() -> dict[str, Tensor]:
        key = random.key(0)
        with torch.device("cpu"):  # whatever the device in force, nothing is allocated there
            with random.python_seeded(key):
                found = record(module_factory, key)
            params = _built(module_factory, key) if found is None else found[1]
        return {name: _shape(x) for name, x in params.items()}

    return Recipe(trace, pieces)


def _built(module_factory: Callable[[], nn.Module], key: Tensor) -> dict[str, Tensor]:
    """Return the parameters of a module that is built for real."""
    with random.python_seeded(key), random.seeded(key):
        module = module_factory()
        if not isinstance(module, nn.Module):
            raise LossError("a recipe needs a function that builds a module", got=type(module).__name__,
                            want="fds.recipe(lambda: nn.Linear(3, 2))")  # fmt: skip
        return {name: p.detach() for name, p in module.named_parameters()}


def _shape(x: Tensor | Window) -> Tensor:
    if isinstance(x, Tensor):
        return x.to("meta")
    return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta")
