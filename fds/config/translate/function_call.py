"""A call of fds as data: it prints as Python, and makes what it says."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import attrs

from fds import optim, plans, schedules
from fds.collectives import Mesh
from fds.transforms.accumulate import accumulate
from fds.transforms.autocast import autocast
from fds.transforms.checkpoint_activations import checkpoint_activations
from fds.transforms.clip_by_global_norm import clip_by_global_norm
from fds.transforms.loss_scale import loss_scale
from fds.transforms.pipeline import pipeline
from fds.transforms.precision import precision
from fds.transforms.shard_optimizer import shard_optimizer
from fds.transforms.skip_nonfinite import skip_nonfinite
from fds.transforms.static_loss_scale import static_loss_scale

FOUND = {  # path below fds -> what is there: all that a configuration may call or name
    **{f.__name__: f for f in (
        accumulate, autocast, checkpoint_activations, clip_by_global_norm, loss_scale, pipeline, precision,
        shard_optimizer, skip_nonfinite, static_loss_scale, optim.adam, optim.adamw, optim.lamb, optim.lion,
        optim.adagrad, optim.sgd,
    )},
    **{f"schedules.{name}": getattr(schedules, name) for name in schedules.__all__},
    "plans.one_f_one_b": plans.one_f_one_b,
}


@attrs.frozen
class AxisOf:
    """An axis of the mesh that will be there."""

    name: str

    def __str__(self) -> str:
        return f'mesh["{self.name}"]'


@attrs.frozen
class Name:
    """A name below `fds` that is passed as it is, not called."""

    path: str

    def __str__(self) -> str:
        return f"fds.{self.path}"


@attrs.frozen
class Call:
    """A call: what is called, by its path below `fds`, and with what. Arguments may be calls, axes and names.

    >>> print(Call("adamw", (Call("schedules.warmup", (3e-4,)),), {"weight_decay": 0.1}))
    fds.adamw(fds.schedules.warmup(0.0003), weight_decay=0.1)
    """

    path: str
    args: tuple = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, path: str, *args: Any, **kwargs: Any) -> Call:
        """Return the call with those keywords that differ from the function's defaults."""
        return cls(path, args, {name: value for name, value in kwargs.items() if value != default(path, name)})

    def argument(self, name: str) -> Any:
        """Return what is passed under a name, or the function's default."""
        return self.kwargs.get(name, default(self.path, name))

    def build(self, mesh: Mesh | None) -> Any:
        """Return what the call makes, on this mesh if it speaks of axes."""
        args = [_built(value, mesh) for value in self.args]
        return FOUND[self.path](*args, **{name: _built(value, mesh) for name, value in self.kwargs.items()})

    def __str__(self) -> str:
        words = [*map(_word, self.args), *(f"{name}={_word(value)}" for name, value in self.kwargs.items())]
        return f"fds.{self.path}({', '.join(words)})"


@functools.cache
def default(path: str, name: str) -> Any:
    """Return the default of an argument of the function at a path below `fds`."""
    return inspect.signature(FOUND[path]).parameters[name].default


def _built(value: Any, mesh: Mesh | None) -> Any:
    if isinstance(value, Call):
        return value.build(mesh)
    if isinstance(value, AxisOf):
        assert mesh is not None
        return mesh[value.name]
    if isinstance(value, Name):
        return FOUND[value.path]
    return tuple(_built(one, mesh) for one in value) if isinstance(value, tuple) else value


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_word, value))}{',' * (len(value) == 1)})"
    return str(value) if isinstance(value, Call | AxisOf | Name) else repr(value)
