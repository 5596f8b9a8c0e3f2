"""Layers to be built when and where they are needed."""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fds.errors import LossError


class LayerSpec:
    """A layer to be built when and where it is needed: `LayerSpec(nn.Linear, 8, 8, bias=False)`.

    Parts of it are specs too, which it builds: `LayerSpec(nn.Sequential, LayerSpec(nn.Linear, 8, 8), nn.GELU())`.
    Raises `LossError` for arguments with values of their own, which no key decides: modules with parameters or buffers,
    and parameters.
    """

    key: str | None = None
    forward_fn: Callable | None = None

    def __init__(self, cls: Callable[..., nn.Module], *args: Any, **kwargs: Any):
        self.cls, self.args, self.kwargs = cls, args, kwargs
        for x in _arguments((cls, args, kwargs)):
            if isinstance(x, TiedLayerSpec):
                raise LossError("a tied layer stands inside of another", where=repr(self), got=repr(x),
                                want="Layers([..., TiedLayerSpec(...), ...], criterion)")  # fmt: skip
            if _has_values(x):
                raise LossError(
                    "an argument of a layer was initialised before, from torch's global generator", where=_name(cls),
                    got=f"{x}"[:80], want=f"LayerSpec({_name(cls)}, LayerSpec(nn.Linear, ...), ...)",
                    hint="a module that is to keep its values is a layer itself: Layers([module, ...])",
                )  # fmt: skip

    def build(self) -> nn.Module:
        """Return the layer, made anew."""
        args, kwargs = _built((self.args, self.kwargs))
        return self.cls(*args, **kwargs)

    def __repr__(self) -> str:
        words = [_name(self.cls), *map(repr, self.args)]
        return f"{type(self).__name__}({', '.join(words + [f'{k}={v!r}' for k, v in self.kwargs.items()])})"


class TiedLayerSpec(LayerSpec):
    """A layer whose parameters all layers of the same `key` share; they are named `<key>.<name>`.

    `forward_fn(module, x)` says how this use of it is called (an embedding used as the output projection).
    The first one of a key builds the layer, which gives the parameters their initial values.
    """

    def __init__(
        self, key: str, cls: Callable[..., nn.Module], *args: Any, forward_fn: Callable | None = None, **kwargs: Any
    ):
        super().__init__(cls, *args, **kwargs)
        if key[:1].isdecimal():
            raise LossError("the key of a tied layer begins with a number, as other layers' names do", got=repr(key),
                            want="a word")  # fmt: skip
        self.key, self.forward_fn = key, forward_fn


def _arguments(x: Any) -> Iterator[Any]:
    """Yield the arguments of a layer, and what is in lists, tuples, dicts, specs and partial functions among them."""
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
