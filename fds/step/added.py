"""The station `added`: parameters that a loss lacks and a transform trains, such as factors of low rank.

They lie in the tree of parameters, which is a dict by name, each after the one that it belongs to. `step.init` makes
them, unless it is given them; then they are parameters as any other. What computes with them is a view, or a map of
modules, whose method `adds(number)` returns for a module of the loss, by path, their names and what they are like.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs
from torch import Tensor

from fds import loss as losses, random, tree
from fds.errors import StateError
from fds.step.placements import Replicated, SplitDim

Lies = SplitDim | Replicated


class Adds(Protocol):
    """What adds parameters."""

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise an `FdsError` where it adds nothing beside parameters of these whole shapes, and should."""
        ...

    def beside(self, name: str, x: Tensor, key: Tensor) -> Mapping[str, Tensor]:
        """Return what is added beside a whole parameter, by name; on `meta` beside one that is there."""
        ...

    def lie(self, lies: Mapping[str, Lies]) -> Mapping[str, Lies]:
        """Return how that lies along a tensor axis, given how parameters of the loss do."""
        ...


def with_added(adds: Sequence[Adds], params: Any, key: int | Tensor = 0) -> Any:
    """Return parameters, or what makes them, with those that are added, unless they are there.

    Raises `StateError` where they are no dict by name.
    """
    if not adds:
        return params
    if isinstance(params, losses.Recipe):
        return _recipe(adds, params)
    if callable(params):
        return functools.partial(_called, adds, params)
    key, names = random.key(key), tree.paths(params)
    for filler in adds:
        filler.check({at: tuple(x.shape) for at, x in names.items() if isinstance(x, Tensor)})
    more = {at: _beside(adds, at, x, key, names) for at, x in names.items() if isinstance(x, Tensor)}
    if not any(more.values()):
        return params
    if not (tree.is_dict(params) and all(isinstance(x, Tensor) for x in params.values())):
        raise StateError(
            "parameters are added to a dict by name",
            where=next(at for at, new in more.items() if new),
            got=type(params).__name__,
            want="the dict that fds.functional returns, or fds.Layers(...).init",
        )
    return type(params)((name, x) for at in params for name, x in ((at, params[at]), *more[at].items()))


def _called(adds: Sequence[Adds], make: Callable[[Tensor], Any], key: Tensor) -> Any:
    return with_added(adds, make(key), key)


def _beside(adds: Sequence[Adds], at: str, x: Tensor, key: Tensor, names: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what is added beside a parameter and has none of these names. Raises `StateError` for a name twice."""
    new: dict[str, Tensor] = {}
    for filler in adds:
        for name, y in filler.beside(at, x, key).items():
            if name in new:
                raise StateError("two transforms add one parameter", where=name, hint="give each its own name=...")
            new[name] = y
            if name in names and names[name].shape != y.shape:
                raise StateError(
                    "a parameter has another shape than the one that is added",
                    where=name,
                    got=str(tuple(names[name].shape)),
                    want=str(tuple(y.shape)),
                )
    return {name: y for name, y in new.items() if name not in names}


def _recipe(adds: Sequence[Adds], recipe: losses.Recipe) -> losses.Recipe:
    """Return a recipe that makes what is added, too, with each piece."""
    names: dict[str, Any] = {}

    def trace() -> dict[str, Tensor]:
        names.update(recipe.trace())
        return with_added(adds, dict(names))

    def pieces(key: Tensor, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[dict[str, Tensor]]:
        for piece in recipe.pieces(key, wanted):
            whole = {name: x for at, x in piece.items() for name, x in _each(adds, at, x, key, names or piece)}
            piece.clear()
            yield whole

    return attrs.evolve(recipe, trace=trace, pieces=pieces)


def _each(
    adds: Sequence[Adds], at: str, x: Tensor, key: Tensor, names: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    yield at, x
    yield from _beside(adds, at, x, key, names).items()
