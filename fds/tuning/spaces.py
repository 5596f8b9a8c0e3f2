"""What is searched: the compositions that a function of a mesh and of choices makes."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from fds import plans
from fds.collectives import Mesh
from fds.errors import FdsError, is_int
from fds.media import Disk, disk
from fds.step import Transport, compose
from fds.step.composition import Composition
from fds.transforms.accumulate import accumulate
from fds.transforms.checkpoint_activations import checkpoint_activations
from fds.transforms.offload import offload
from fds.transforms.pipeline import pipeline
from fds.transforms.shard_optimizer import shard_optimizer
from fds.transforms.tensor_parallel import tensor_parallel
from fds.transports import onebit, quantized

SCHEDULES = {f.__name__: f for f in (plans.gpipe, plans.one_f_one_b, plans.zb_h1, plans.zb_h2)}
MEDIA = ("device", "host", "disk")
TRANSPORTS: Mapping[str, Callable[[], Transport | None]] = {
    "lossless": lambda: None,
    "quantized(8)": lambda: quantized(8),
    "quantized(4)": lambda: quantized(4),
    "onebit()": onebit,
}
_PLACES = ("optimizer", "parameters", "activations")  # choices of media
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
        plain = isinstance(values, list | tuple) and all(isinstance(value, _PLAIN) for value in values)
        if not (plain and values and len({*map(repr, values)}) == len(values)):
            raise FdsError(
                "not values to choose from",
                where=f"Space, choices[{name!r}]",
                got=repr(values)[:80],
                want="a list of different texts, numbers, flags or None",
                hint="a transform is made of them by the function: schedule=['gpipe', 'one_f_one_b']",
            )
    return {name: tuple(values) for name, values in choices.items()}


@attrs.frozen
class Standard:
    """The recipe of `standard`: what shares, splits and recomputes a step, around a composition of the user's."""

    base: Callable[[], Any]
    directory: str | None = None

    def __call__(
        self,
        mesh: Mesh,
        *,
        stage: int,
        microbatches: int,
        recompute: bool,
        schedule: str = "one_f_one_b",
        partition: str = "parameters",
        optimizer: str = "device",
        parameters: str = "device",
        activations: str = "device",
        gradients: str = "lossless",
        weights: str = "lossless",
        bucket: int | None = None,
    ) -> Composition:
        """Return the composition on a mesh of the axes `dp` and, where layers are shared, `pp` and `tp`."""
        parts: list[Any] = []
        if recompute:
            parts.append(checkpoint_activations(**_unless("device", store=self._medium(activations))))
        if "pp" in mesh.shape:
            cut = _unless("parameters", partition=partition)
            parts.append(pipeline(SCHEDULES[schedule], mesh["pp"], num_microbatches=microbatches, **cut))
        elif microbatches > 1:
            parts.append(accumulate(microbatches))
        if "tp" in mesh.shape:
            parts.append(tensor_parallel(mesh["tp"]))
        ways = _unless(None, bucket_bytes=bucket, weights=TRANSPORTS[weights](), gradients=TRANSPORTS[gradients]())
        parts.append(shard_optimizer(mesh["dp"], stage=stage, **ways))
        moments = self._medium(optimizer)
        if places := _unless("device", moments=moments, gradients=moments, masters=self._medium(parameters)):
            parts.append(offload(**places))
        return compose(*parts, self.base())

    def _medium(self, name: str) -> str | Disk:
        return disk(self.directory) if name == "disk" and self.directory is not None else name


def _unless(usual: Any, **arguments: Any) -> dict[str, Any]:
    """Return the arguments that differ from what they usually are."""
    return {name: value for name, value in arguments.items() if value != usual}


def standard(
    base: Callable[[], Any],
    ranks: int,
    *,
    stages: Sequence[int] = (0, 1, 2, 3),
    microbatches: Sequence[int] = (1, 2, 4, 8),
    recompute: Sequence[bool] = (False, True),
    pipelines: Sequence[int] = (1,),
    schedules: Sequence[str] = ("one_f_one_b",),
    partitions: Sequence[str] = ("parameters",),
    tensor: Sequence[int] = (1,),
    buckets: Sequence[int | None] = (None,),
    optimizer: Sequence[str] = ("device",),
    parameters: Sequence[str] = ("device",),
    activations: Sequence[str] = ("device",),
    directory: str | os.PathLike[str] | None = None,
    gradients: Sequence[str] = ("lossless",),
    weights: Sequence[str] = ("lossless",),
) -> Space:
    """Return the space of stages, microbatches, recomputation and whatever else is asked for, around a composition.

    Args:
        base: called without arguments, returns the rest of the composition, with its optimizer:
            `functools.partial(fds.adamw, 3e-4)`, or a function at the top of a module.
        ranks: how many there are.
        stages: of ZeRO; what a pipeline does not take is refused in the report.
        microbatches: into how many a rank's rows of a step are split.
        recompute: whether layers keep nothing but their inputs from forward to backward.
        pipelines: numbers of stages of pipelines; the other ranks share the rows.
        schedules: of pipelines: "gpipe", "one_f_one_b", "zb_h1", "zb_h2".
        partitions: which stage has which layers, as `fds.pipeline` takes it: "parameters", "uniform", "type:REGEX".
        tensor: numbers of ranks that divide each layer (`fds.tensor_parallel`, by its plan "auto"); a loss whose
            modules it does not know is refused in the report.
        buckets: bytes of a message of sharded state; None as `fds.shard_optimizer` chooses.
        optimizer: where moments and sums of gradients live: "device", "host", "disk".
        parameters: where master parameters live.
        activations: where the inputs of recomputed layers wait for backward.
        directory: of what lives on a disk.
        gradients: how they travel: "lossless", "quantized(8)", "quantized(4)", "onebit()". Only the first leaves the
            numbers of a training as they are, so that others are tried where they are named.
        weights: how gathered parameters travel, from stage 1 on: "lossless", "quantized(8)", "quantized(4)".

    A choice without effect has its first value alone: of schedules where there is no pipeline, of ways to travel where
    one rank has all rows.

    Raises `FdsError` for sizes that do not divide the ranks, names that are not of these, and a disk without directory.
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
    if not isinstance(directory, str | os.PathLike | None):
        raise FdsError("not a directory", where="standard, directory", got=repr(directory)[:80], want="a path, or None")
    choices: dict[str, Any] = {
        "stage": _values("stages", stages, lambda x: is_int(x) and 0 <= x <= 3, "0 to 3"),
        "microbatches": _values("microbatches", microbatches, lambda x: is_int(x, 1), "an int >= 1"),
        "recompute": _values("recompute", recompute, lambda x: isinstance(x, bool), "True or False"),
    }
    others = {
        "schedule": _names("schedules", schedules, SCHEDULES),
        "partition": _values("partitions", partitions, lambda x: isinstance(x, str), '"parameters", "uniform"'),
        "optimizer": _names("optimizer", optimizer, MEDIA),
        "parameters": _names("parameters", parameters, MEDIA),
        "activations": _names("activations", activations, MEDIA),
        "gradients": _names("gradients", gradients, TRANSPORTS),
        "weights": _names("weights", weights, [name for name in TRANSPORTS if name != "onebit()"]),
        "bucket": _values("buckets", buckets, lambda x: x is None or is_int(x, 1), "bytes, or None"),
    }
    usual = inspect.signature(Standard.__call__).parameters
    choices |= {name: values for name, values in others.items() if values != [usual[name].default]}
    if directory is None and any("disk" in choices.get(name, ()) for name in _PLACES):
        raise FdsError("a disk needs a directory", where="standard, directory", got="None", want='directory="/nvme"')
    axes = []
    for stage_ranks in _values(
        "pipelines", pipelines, lambda x: is_int(x, 1) and not ranks % x, f"a divisor of {ranks}"
    ):
        for size in _values("tensor", tensor, lambda x: is_int(x, 1), "an int >= 1"):
            if ranks % (stage_ranks * size):
                continue
            sizes = {"pp": stage_ranks, "dp": ranks // (stage_ranks * size), "tp": size}
            axes.append({name: n for name, n in sizes.items() if n > 1 or name == "dp"})
    if not axes:
        raise FdsError(
            "no sizes divide the ranks", where="standard, pipelines, tensor", got=f"{ranks} ranks", want="smaller ones"
        )
    recipe = Standard(base, None if directory is None else os.fspath(directory))
    return Space(recipe, axes, choices, _Differs({name: values[0] for name, values in choices.items()}))


def _values(name: str, values: Any, holds: Callable[[Any], bool], want: str) -> list[Any]:
    """Return values to choose from. Raises `FdsError` for those of which something does not hold."""
    if not isinstance(values, list | tuple) or not values:
        raise FdsError("not values to try", where=f"standard, {name}", got=repr(values)[:80], want=f"a list: {want}")
    for value in values:
        if not holds(value):
            raise FdsError("not a value to try", where=f"standard, {name}", got=repr(value)[:80], want=want)
    return [*values]


def _names(name: str, values: Any, names: Iterable[str]) -> list[str]:
    return _values(name, values, lambda x: isinstance(x, str) and x in names, ", ".join(names))


@attrs.frozen
class _Differs:
    """Leave out all but the first value of choices that have no effect."""

    firsts: Mapping[str, Any]

    def __call__(self, axes: Mapping[str, int], choices: Mapping[str, Any]) -> bool:
        shares = axes["dp"] > 1
        effects = {
            "schedule": "pp" in axes,
            "partition": "pp" in axes,
            "activations": choices["recompute"],
            "gradients": shares,
            "weights": shares and choices["stage"] > 0,
            "bucket": shares,
        }
        return all(effects.get(name, True) or value == self.firsts[name] for name, value in choices.items())
