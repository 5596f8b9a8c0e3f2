"""Calls of functions of fds as data, which print as Python and can be executed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import attrs

from fds import optim, plans, schedules, transports
from fds.collectives import Mesh
from fds.media import disk
from fds.transforms.accumulate import accumulate
from fds.transforms.checkpoint_activations import checkpoint_activations
from fds.transforms.clip import clip_by_global_norm
from fds.transforms.context_parallel import context_parallel
from fds.transforms.freeze import quantize_frozen
from fds.transforms.loss_scale import loss_scale, skip_nonfinite, static_loss_scale
from fds.transforms.offload import offload
from fds.transforms.pipeline import pipeline
from fds.transforms.precision import autocast, precision
from fds.transforms.profiled import profiled
from fds.transforms.shard_optimizer import shard_optimizer
from fds.transforms.tensor_parallel import tensor_parallel

FUNCTIONS = {  # path below fds -> function; everything that a configuration may call or pass
    **{
        f.__name__: f
        for f in (
            accumulate,
            autocast,
            checkpoint_activations,
            clip_by_global_norm,
            context_parallel,
            disk,
            loss_scale,
            offload,
            pipeline,
            precision,
            profiled,
            quantize_frozen,
            shard_optimizer,
            skip_nonfinite,
            static_loss_scale,
            tensor_parallel,
            optim.adam,
            optim.adamw,
            optim.lamb,
            optim.lion,
            optim.adagrad,
            optim.sgd,
            optim.onebit_adam,
            optim.onebit_lamb,
            optim.zero_one_adam,
        )
    },
    **{f"schedules.{name}": getattr(schedules, name) for name in schedules.__all__},
    **{f"transports.{name}": getattr(transports, name) for name in ("hierarchical", "quantized", "rows")},
    "plans.one_f_one_b": plans.one_f_one_b,
}


@attrs.frozen
class AxisOf:
    """An axis of the mesh by its name, which for several, flattened, has commas: "node,dp"."""

    name: str

    def __str__(self) -> str:
        return "mesh[" + ", ".join(f'"{name}"' for name in self.name.split(",")) + "]"


@attrs.frozen
class Name:
    """A function below `fds` that is passed, not called."""

    path: str

    def __str__(self) -> str:
        return f"fds.{self.path}"


@attrs.frozen
class FunctionCall:
    """A call of the function at a path below `fds`. Arguments may be calls, axes and names.

    >>> print(FunctionCall("adamw", (FunctionCall("schedules.warmup", (3e-4,)),), {"weight_decay": 0.1}))
    fds.adamw(fds.schedules.warmup(0.0003), weight_decay=0.1)
    """

    path: str
    args: tuple = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, path: str, *args: Any, **kwargs: Any) -> FunctionCall:
        """Return the call, without the keywords that equal the function's defaults, but with the kind of a schedule."""
        shown = {name: value for name, value in kwargs.items() if name == "kind" or value != default(path, name)}
        return cls(path, args, shown)

    def argument(self, name: str) -> Any:
        """Return the value of a keyword, or the function's default."""
        return self.kwargs.get(name, default(self.path, name))

    def build(self, mesh: Mesh | None) -> Any:
        """Execute the call; `mesh` is needed if it has axes among its arguments."""
        args = [_build(value, mesh) for value in self.args]
        return FUNCTIONS[self.path](*args, **{name: _build(value, mesh) for name, value in self.kwargs.items()})

    def __str__(self) -> str:
        arguments = [*map(_source, self.args), *(f"{name}={_source(value)}" for name, value in self.kwargs.items())]
        return f"fds.{self.path}({', '.join(arguments)})"


@functools.cache
def default(path: str, name: str) -> Any:
    """Return the default of an argument of the function at a path below `fds`."""
    return inspect.signature(FUNCTIONS[path]).parameters[name].default


def _build(value: Any, mesh: Mesh | None) -> Any:
    if isinstance(value, FunctionCall):
        return value.build(mesh)
    if isinstance(value, AxisOf):
        assert mesh is not None
        return mesh[tuple(value.name.split(","))]
    if isinstance(value, Name):
        return FUNCTIONS[value.path]
    if isinstance(value, dict):
        return {name: _build(one, mesh) for name, one in value.items()}
    return tuple(_build(one, mesh) for one in value) if isinstance(value, tuple) else value


def _source(value: Any) -> str:
    """Return the Python source of an argument."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_source, value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_source(one)}" for name, one in value.items()) + "}"
    return str(value) if isinstance(value, FunctionCall | AxisOf | Name) else repr(value)
