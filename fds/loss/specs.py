"""`LayerSpec`, `TiedLayerSpec`: how to build a layer, on the rank and at the time it is needed."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fds.errors import LossError


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
        args, kwargs = _built((self.args, self.kwargs))
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


def _built(x: Any) -> Any:
    """Return arguments with the specs among them built, in order."""
    if isinstance(x, LayerSpec):
        return x.build()
    if type(x) in (dict, OrderedDict):
        return type(x)((key, _built(y)) for key, y in x.items())
    return type(x)(map(_built, x)) if type(x) in (list, tuple) else x


def _name(cls: Any) -> str:
    return getattr(cls, "__name__", repr(cls))
