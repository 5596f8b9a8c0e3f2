"""Which modules a loss runs: those of `Layers`, and those that its function reaches as `functional` returned them."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from fds.loss.compiling import CompiledLoss
from fds.loss.layers import Layers
from fds.loss.modules import Apply
from fds.loss.values import Buffered


class Found(NamedTuple):
    """A module that a loss runs copies of: its structure, parameters on meta.

    `number` and `prefix` are those of the `Root` of its copies; `paths` of all its parameters lead to their names.
    """

    number: int
    prefix: str
    module: nn.Module
    paths: dict[str, str]


def modules_of(loss: Any) -> list[Found]:
    """Return the modules of a loss, in the order of its layers, or as they are found."""
    if isinstance(loss, Layers):
        applies = [loss.layer(i).apply for i in range(len(loss))]
    else:
        applies = list(_reached(loss))
    unique = {x.number: x for x in applies if x is not None}
    return [Found(x.number, x.prefix, x.source, x.param_paths) for x in unique.values()]


def _reached(loss: Any) -> Iterator[Apply]:
    """Yield what a function reaches: its closure, defaults, globals that it names, and what it was bound to."""
    todo, seen = [loss], set[int]()
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, type | types.ModuleType):
            continue
        seen.add(id(x))
        if isinstance(x, Apply):
            yield x
        elif isinstance(x, Buffered):
            todo.append(x.loss_fn)
        elif isinstance(x, CompiledLoss):
            todo.append(x.function)
        elif isinstance(x, functools.partial):
            todo += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, types.MethodType):
            todo += [x.__func__, x.__self__]
        elif isinstance(x, types.FunctionType):
            todo += [*inspect.getclosurevars(x).nonlocals.values(), *(x.__defaults__ or ())]
            todo += [*(x.__kwdefaults__ or {}).values(), *_named_globals(x.__code__, x.__globals__)]
        elif isinstance(x, list | tuple):
            todo += x
        elif isinstance(x, dict):
            todo += x.values()
        elif callable(x) and hasattr(x, "__dict__") and not isinstance(x, nn.Module):
            todo += [*vars(x).values(), type(x).__call__]


def _named_globals(code: types.CodeType, known: dict[str, Any]) -> Iterator[Any]:
    """Yield the globals that code names, also in functions inside: `apply` values, and functions of the same file."""
    for name in code.co_names:
        x = known.get(name)
        if isinstance(x, Apply) or (isinstance(x, types.FunctionType) and x.__globals__ is known):
            yield x
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _named_globals(inner, known)
