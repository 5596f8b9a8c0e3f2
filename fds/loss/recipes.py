"""What is built later: layers, where and when they are needed; parameters from a key, one layer at a time."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn

from fds import random
from fds.errors import LossError
from fds.loss.recorder import Window, record, record_module


class LayerSpec:
    """A layer that is built later, where it is needed: `LayerSpec(nn.Linear, 8, 8, bias=False)`.

    Arguments may be specs too: `LayerSpec(nn.Sequential, LayerSpec(nn.Linear, 8, 8), nn.GELU())`. Raises `LossError`
    for arguments whose values are already initialized, and so do not follow from the key: parameters, and modules with
    parameters or buffers.
    """

    key: str | None = None
    forward_fn: Callable[..., Any] | None = None

    def __init__(self, cls: Callable[..., nn.Module], *args: Any, **kwargs: Any):
        self.cls, self.args, self.kwargs = cls, args, kwargs
        for x in _arguments((cls, args, kwargs)):
            if isinstance(x, TiedLayerSpec):
                raise LossError(
                    "a tied layer inside another layer",
                    where=repr(self),
                    got=repr(x),
                    want="Layers([..., TiedLayerSpec(...), ...], criterion)",
                )
            if _has_values(x):
                raise LossError(
                    "an argument of a layer was already initialised, from torch's global generator",
                    where=_name(cls),
                    got=f"{x}"[:80],
                    want=f"LayerSpec({_name(cls)}, LayerSpec(nn.Linear, ...), ...)",
                    hint="to keep the values of a module, make it a layer: Layers([module, ...])",
                )

    def build(self) -> nn.Module:
        """Build the layer and return it; every call builds another one."""
        args, kwargs = _build_specs((self.args, self.kwargs))
        return self.cls(*args, **kwargs)

    def __repr__(self) -> str:
        words = [_name(self.cls), *map(repr, self.args)]
        return f"{type(self).__name__}({', '.join(words + [f'{k}={v!r}' for k, v in self.kwargs.items()])})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares its parameters with all layers of the same `key`; they are named `<key>.<name>`.

    `forward_fn(module, x)` computes this use of the layer (an embedding used as the output projection).
    The first layer of a key is built, and determines the initial values.
    """

    def __init__(
        self,
        key: str,
        cls: Callable[..., nn.Module],
        *args: Any,
        forward_fn: Callable[..., Any] | None = None,
        **kwargs: Any,
    ):
        super().__init__(cls, *args, **kwargs)
        if key[:1].isdecimal():
            raise LossError(
                "the key of a tied layer begins with a digit, as other layers' names do", got=repr(key), want="a word"
            )
        self.key, self.forward_fn = key, forward_fn


def _arguments(x: Any) -> Iterator[Any]:
    """Yield the arguments of a layer, also those inside lists, tuples, dicts, specs and partial functions."""
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, functools.partial):
        x = (x.func, *x.args, *x.keywords.values())
    if type(x) is LayerSpec:
        x = (x.cls, *x.args, *x.kwargs.values())
    if isinstance(x, list | tuple | set | frozenset):
        for y in x:
            yield from _arguments(y)
    else:
        yield x


def _has_values(x: Any) -> bool:
    if isinstance(x, nn.Module):
        return any(True for _ in (*x.parameters(), *x.buffers()))
    return isinstance(x, nn.Parameter) or (inspect.ismethod(x) and _has_values(x.__self__))


def _build_specs(x: Any) -> Any:
    """Return arguments with the specs among them built, in order."""
    if isinstance(x, LayerSpec):
        return x.build()
    if type(x) in (dict, OrderedDict):
        return type(x)((key, _build_specs(y)) for key, y in x.items())
    return type(x)(map(_build_specs, x)) if type(x) in (list, tuple) else x


def _name(cls: Any) -> str:
    return getattr(cls, "__name__", repr(cls))


@attrs.frozen(eq=False)
class Recipe:
    """A function `key -> params` that can also return only the shapes, or the parameters in pieces.

    Attributes:
        trace: `trace() -> params` on `meta`: nothing is allocated or drawn.
        pieces: `pieces(key, wanted)` yields `{name: tensor}`, one layer at a time, in the order of the trace. Layers
            for which `wanted(name)` is false for every name are skipped, unless they were passed as built modules.
        built: names of parameters of modules that were passed built; their values may differ between ranks.
    """

    trace: Callable[[], dict[str, Tensor]]
    pieces: Callable[..., Iterator[dict[str, Tensor]]]
    built: frozenset[str] = frozenset()

    def __call__(self, key: Tensor) -> dict[str, Tensor]:
        """Return all parameters, in the order of the trace."""
        return {name: x for piece in self.pieces(key) for name, x in piece.items()}


def always(name: str) -> bool:
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

    def pieces(key: Tensor, wanted: Callable[[str], bool] = always) -> Iterator[dict[str, Tensor]]:
        with random.python_seeded(key):
            recording = record(module_factory, key)
        if recording is None:
            yield _build(module_factory, key)
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
            params = _build(module_factory, key) if recording is None else recording[1]
        return {name: _shape(x) for name, x in params.items()}

    return Recipe(trace, pieces)


def on_meta(module_factory: Callable[[], nn.Module]) -> nn.Module:
    """Return the module that a function builds, with its parameters on `meta`; buffers have their values.

    Operations are recorded as those of a `recipe` are, so that no parameter is ever in memory. Where they cannot be
    recorded, the module is built for real, and its parameters are let go of.
    """
    key = random.key(0)
    with random.python_seeded(key):
        module = record_module(module_factory, key)
    if module is not None:
        return module
    module, on_meta = _built(module_factory, key), dict[int, nn.Parameter]()
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                on_meta.setdefault(id(p), nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad))
                part._parameters[name] = on_meta[id(p)]
    return module


def _build(module_factory: Callable[[], nn.Module], key: Tensor) -> dict[str, Tensor]:
    """Return the parameters of a module that is built for real."""
    return {name: p.detach() for name, p in _built(module_factory, key).named_parameters()}


def _built(module_factory: Callable[[], nn.Module], key: Tensor) -> nn.Module:
    with random.python_seeded(key), random.seeded(key):
        module = module_factory()
    if not isinstance(module, nn.Module):
        raise LossError(
            "a recipe needs a function that builds a module",
            got=type(module).__name__,
            want="fds.recipe(lambda: nn.Linear(3, 2))",
        )
    return module


def _shape(x: Tensor | Window) -> Tensor:
    if isinstance(x, Tensor):
        return x.to("meta")
    return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta")
