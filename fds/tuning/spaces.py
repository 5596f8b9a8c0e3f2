"""What is searched: the compositions that a function of a mesh and of choices makes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from fds import plans
from fds.collectives import Mesh
from fds.errors import FdsError, is_int
from fds.step import compose
from fds.step.composition import Composition
from fds.transforms.accumulate import accumulate
from fds.transforms.checkpoint_activations import checkpoint_activations
from fds.transforms.pipeline import pipeline
from fds.transforms.shard_optimizer import shard_optimizer

SCHEDULES = {f.__name__: f for f in (plans.gpipe, plans.one_f_one_b, plans.zb_h1, plans.zb_h2)}
_PLAIN = (str, int, float, bool, type(None))


@attrs.frozen
class Candidate:
    """One of the compositions of a space.

    Attributes:
        axes: the size of every axis of its mesh.
        choices: name -> value, what the space's function is called with beside the mesh.
    """

    axes: Mapping[str, int]
    choices: Mapping[str, Any]

    @property
    def num_ranks(self) -> int:
        """How many ranks it runs on."""
        return math.prod(self.axes.values())

    @property
    def key(self) -> str:
        """A text that no other candidate of the space has: its JSON."""
        return json.dumps({"axes": dict(self.axes), **self.choices})

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in {**self.axes, **self.choices}.items())


@attrs.frozen
class Space:
    """Compositions to choose from: `compose` called with every mesh and every combination of values.

        def recipe(mesh, stage, accumulate):
            sharded = fds.shard_optimizer(mesh["dp"], stage=stage)
            return fds.compose(fds.accumulate(accumulate), sharded, fds.adamw(1e-3))

        space = fds.tuning.Space(recipe, {"dp": 2}, {"stage": [0, 1, 2], "accumulate": [1, 2, 4]})

    Trials run in fresh processes, which import `compose`: it is a function at the top of a module, or an object that
    pickles.

    Attributes:
        compose: `(mesh, **choices) -> ` what `fds.compose` returns.
        axes: sizes of the axes of a mesh, `{"dp": 2}`, or several such. The axis "dp" has the rows of the batch; ranks
            that differ along others have the same.
        choices: name -> the values to try, in the order of a grid search: texts, numbers, flags or None.
        allows: `(axes, choices) -> bool`, whether a combination belongs to the space; None for all.

    Raises `FdsError` for anything else.
    """

    compose: Callable[..., Any]
    axes: tuple[Mapping[str, int], ...] = attrs.field(converter=lambda axes: _meshes(axes))
    choices: Mapping[str, tuple[Any, ...]] = attrs.field(factory=dict, converter=lambda choices: _choices(choices))
    allows: Callable[[Mapping[str, int], Mapping[str, Any]], bool] | None = None

    def __attrs_post_init__(self) -> None:
        for name, function in (("compose", self.compose), ("allows", self.allows)):
            if not callable(function) and (function is not None or name == "compose"):
                raise FdsError("not a function", where=f"Space, {name}", got=repr(function)[:80], want="a function")
        if not self.candidates():
            raise FdsError("nothing is in the space", where="Space, allows", want="one combination that it allows")

    def __iter__(self) -> Iterator[Candidate]:
        for axes in self.axes:
            for values in itertools.product(*self.choices.values()):
                choices = dict(zip(self.choices, values, strict=True))
                if self.allows is None or self.allows(axes, choices):
                    yield Candidate(axes, choices)

    def candidates(self) -> tuple[Candidate, ...]:
        """Return all compositions, in the order of a grid: the last choice varies fastest."""
        return tuple(self)


def _meshes(axes: Any) -> tuple[Mapping[str, int], ...]:
    several = (axes,) if isinstance(axes, Mapping) else tuple(axes) if isinstance(axes, Sequence) else ()
    for sizes in several:
        if not isinstance(sizes, Mapping) or not sizes or not all(is_int(size, 1) for size in sizes.values()):
            raise FdsError("not sizes of axes", where="Space, axes", got=repr(sizes)[:80], want='{"pp": 2, "dp": 4}')
    if not several or len({math.prod(sizes.values()) for sizes in several}) > 1:
        raise FdsError(
            "meshes of as many ranks each are compared",
            where="Space, axes",
            got=repr(axes)[:80],
            want='{"dp": 4}, or [{"dp": 4}, {"pp": 2, "dp": 2}]',
        )
    return tuple(map(dict, several))


def _choices(choices: Any) -> Mapping[str, tuple[Any, ...]]:
    if not isinstance(choices, Mapping):
        choices = {"choices": None}
    for name, values in choices.items():
        if not (isinstance(name, str) and name.isidentifier()) or name in ("axes", "mesh"):
            raise FdsError(
                "not the name of an argument to choose from",
                where="Space, choices",
                got=repr(name)[:80],
                want="a word, which compose takes beside the mesh",
            )
        if not isinstance(values, list | tuple) or not values or not all(isinstance(v, _PLAIN) for v in values):
            raise FdsError(
                "not values to choose from",
                where=f"Space, choices[{name!r}]",
                got=repr(values)[:80],
                want="a list of texts, numbers, flags or None",
                hint="a transform is made of them by the function: schedule=['gpipe', 'one_f_one_b']",
            )
    return {name: tuple(values) for name, values in choices.items()}


@attrs.frozen
class Standard:
    """The recipe of `standard`: what shares, splits and recomputes a step, around a composition of the user's."""

    base: Callable[[], Any]

    def __call__(
        self, mesh: Mesh, *, stage: int, microbatches: int, recompute: bool, schedule: str = "one_f_one_b"
    ) -> Composition:
        """Return the composition on a mesh of the axes `dp` and, for a pipeline, `pp`."""
        parts: list[Any] = [checkpoint_activations()] if recompute else []
        if "pp" in mesh.shape:
            parts.append(pipeline(SCHEDULES[schedule], mesh["pp"], num_microbatches=microbatches))
        elif microbatches > 1:
            parts.append(accumulate(microbatches))
        return compose(*parts, shard_optimizer(mesh["dp"], stage=stage), self.base())


def standard(
    base: Callable[[], Any],
    ranks: int,
    *,
    stages: Sequence[int] = (0, 1, 2, 3),
    microbatches: Sequence[int] = (1, 2, 4, 8),
    recompute: Sequence[bool] = (False, True),
    pipelines: Sequence[int] = (1,),
    schedules: Sequence[str] = ("one_f_one_b",),
) -> Space:
    """Return the space of stages, microbatches, recomputation and pipelines around a composition.

    Args:
        base: called without arguments, returns the rest of the composition, with its optimizer:
            `functools.partial(fds.adamw, 3e-4)`, or a function at the top of a module.
        ranks: how many there are.
        stages: of ZeRO; what a pipeline does not take is refused in the report.
        microbatches: into how many a rank's rows of a step are split.
        recompute: whether layers keep nothing but their inputs from forward to backward.
        pipelines: numbers of stages of pipelines; the other ranks share the rows.
        schedules: of pipelines: "gpipe", "one_f_one_b", "zb_h1", "zb_h2".

    Raises `FdsError` for numbers of stages of a pipeline that do not divide the ranks, and unknown schedules.
    """
    if not is_int(ranks, 1):
        raise FdsError("not a number of ranks", where="standard, ranks", got=repr(ranks), want="an int >= 1")
    if not callable(base):
        raise FdsError(
            "not a function that is called without arguments",
            where="standard, base",
            got=repr(base)[:80],
            want="functools.partial(fds.adamw, 3e-4)",
        )
    for size in pipelines:
        if not is_int(size, 1) or ranks % size:
            raise FdsError(
                "not a number of stages", where="standard, pipelines", got=repr(size), want=f"a divisor of {ranks}"
            )
    for name in schedules:
        if name not in SCHEDULES:
            raise FdsError("no such schedule", where="standard, schedules", got=repr(name), want=", ".join(SCHEDULES))
    axes = [{"dp": ranks} if size == 1 else {"pp": size, "dp": ranks // size} for size in pipelines]
    choices: dict[str, Any] = {"stage": [*stages], "microbatches": [*microbatches], "recompute": [*recompute]}
    if any(size > 1 for size in pipelines):
        choices["schedule"] = [*schedules]
    return Space(Standard(base), axes, choices, _Differs(schedules[0]))


@attrs.frozen
class _Differs:
    """Leave out other schedules where there is no pipeline."""

    first: str

    def __call__(self, axes: Mapping[str, int], choices: Mapping[str, Any]) -> bool:
        return "pp" in axes or choices.get("schedule", self.first) == self.first
