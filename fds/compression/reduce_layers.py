"""`reduce_layers`: a model of fewer layers, whose layer i is layer `keep[i]` of a larger one.

Source: Sanh et al. 2019, arXiv:1910.01108, section 3 (every other layer of the teacher); Wu et al. 2022,
arXiv:2206.01859 (XTC), section 4.
"""

from __future__ import annotations

import fnmatch
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from fds import tree
from fds.errors import ComposeError, LossError, StateError, is_int
from fds.loss import Layers, row_of_one_class

_NUMBER = re.compile(r"(?<![^.])(\d+)\.")  # a part of a name that is a number


@overload
def reduce_layers(source: Layers, keep: Sequence[int]) -> Layers: ...
@overload
def reduce_layers(
    source: Layers, keep: Sequence[int], *, params: Mapping[str, Tensor]
) -> tuple[Layers, dict[str, Tensor]]: ...
@overload
def reduce_layers(source: Mapping[str, Tensor], keep: Sequence[int], *, prefix: str = "*") -> dict[str, Tensor]: ...
def reduce_layers(
    source: Layers | Mapping[str, Tensor],
    keep: Sequence[int],
    *,
    prefix: str = "*",
    params: Mapping[str, Tensor] | None = None,
) -> Any:
    """Return a smaller model: its layer i is layer `keep[i]` of this one, and all else is as it was.

    Of parameters by name these are copies under new numbers, `"h.5.attn.weight"` under `"h.2.attn.weight"`. Of
    `fds.Layers` it is the longest row of layers of one class that becomes shorter, such as the blocks of a
    transformer; layers that are modules keep their values.

    Args:
        source: parameters, or buffers, by name, as `fds.functional` returns them; or `fds.Layers`.
        keep: numbers of layers, from 0, each at most once.
        prefix: a pattern of what stands before the numbers, `"h"` or `"*.encoder.layer"`, where parameters have several
            lists of layers; a list of layers has two or more, with the same names and shapes in each.
        params: of `fds.Layers`; those of the smaller ones are returned beside them, copies.

    Raises `StateError` for other numbers, for parameters that have no list of layers, or several; `LossError` for
    `fds.Layers` without such a row.
    """
    if isinstance(source, Layers):
        if prefix != "*":
            got, want = f"prefix={prefix!r}"[:80], "fds.Layers alone: its longest row of layers of one class is reduced"
            raise LossError("reduce_layers: a prefix is of the names of parameters", got=got, want=want)
        return _of_layers(source, keep, params)
    if not tree.is_dict(source) or not all(isinstance(n, str) and isinstance(x, Tensor) for n, x in source.items()):
        raise StateError(
            "reduce_layers takes parameters by name",
            got=type(source).__name__,
            want="a dict of tensors, as fds.functional(module) returns, or fds.Layers",
        )
    if params is not None:
        raise StateError("reduce_layers: params are of fds.Layers", got="parameters twice", want="one argument of them")
    head, count = _list_of(source, prefix)
    numbers = _checked(keep, count)
    smaller: dict[str, Tensor] = {}
    for name, x in source.items():
        if name.startswith(head) and (part := _NUMBER.match(name, len(head))):
            if int(part[1]) >= len(numbers):
                continue
            x = source[f"{head}{numbers[int(part[1])]}.{name[part.end() :]}"]
        smaller[name] = x.detach().clone()
    return smaller


def _of_layers(layers: Layers, keep: Sequence[int], params: Mapping[str, Tensor] | None) -> Any:
    """Return fewer layers and, with `params`, theirs."""
    try:
        row = row_of_one_class(layers, "reduce_layers")
    except ComposeError as error:
        raise LossError(error.what, got=error.got, want="layers of one class, one after another") from None
    places = [i for i, name in enumerate(layers.names) if name in row]
    chosen = [places[number] for number in _checked(keep, len(places))]
    first, end = places[0], places[-1] + 1
    origins = [*range(first), *chosen, *range(end, len(layers))]
    kept = [layers.layers[i] for i in origins]
    names = [*layers.names[: first + len(chosen)], *layers.names[end:]]
    if layers.names != tuple(map(str, range(len(layers)))):  # those of an nn.Sequential, which has modules alone
        smaller = Layers(nn.Sequential(OrderedDict(zip(names, kept, strict=True))), layers.criterion)
    else:
        smaller = Layers(kept, layers.criterion)
    if layers.compiler is not None:
        smaller = smaller.compiled(layers.compiler)
    if params is None:
        return smaller
    layers.check(params)
    fewer: dict[str, Tensor] = {}
    for i, origin in enumerate(origins):
        names_there = {local: name for name, local in layers.layer(origin).params.items()}
        of_layer = ((name, params[names_there[local]]) for name, local in smaller.layer(i).params.items())
        fewer.update((name, x.detach().clone()) for name, x in of_layer if name not in fewer)
    return smaller, fewer


def _list_of(params: Mapping[str, Tensor], pattern: str) -> tuple[str, int]:
    """Return what stands before the numbers of the one list of layers, with its dot, and how many layers it has."""
    lists: dict[str, dict[int, set[tuple[str, torch.Size]]]] = {}
    for name, x in params.items():
        for part in _NUMBER.finditer(name):
            layers = lists.setdefault(name[: part.start()], {})
            layers.setdefault(int(part[1]), set()).add((name[part.end() :], x.shape))
    counts = {
        head: len(layers)
        for head, layers in lists.items()
        if layers.keys() == set(range(len(layers)))
        and len(layers) > 1
        and len(set(map(frozenset, layers.values()))) == 1
    }
    matching = [head for head in counts if fnmatch.fnmatchcase(head[:-1], pattern)]
    outermost = [head for head in matching if not any(head != other and head.startswith(other) for other in matching)]
    if len(outermost) == 1:
        return outermost[0], counts[outermost[0]]
    shown = [f"{head[:-1]!r}: {counts[head]} layers" for head in (outermost or counts)]
    raise StateError(
        "reduce_layers: which list of layers is meant?" if outermost else "reduce_layers finds no list of layers",
        where=f"prefix={pattern!r}",
        got=", ".join(shown[:8]) or f"no two layers of the same names and shapes: {tree.named(list(params))}",
        want='the prefix of one list: say, prefix="h"' if shown else 'names such as "h.0.weight" and "h.1.weight"',
    )


def _checked(keep: Any, count: int) -> list[int]:
    """Return the numbers of layers to keep."""
    numbers = list(keep) if isinstance(keep, Sequence | range) and not isinstance(keep, str) else []
    if numbers and all(is_int(x, 0) and x < count for x in numbers) and len(set(numbers)) == len(numbers):
        return numbers
    raise StateError(
        "reduce_layers: these are not numbers of layers",
        where="keep",
        got=repr(keep)[:80],
        want=f"one or more of 0 to {count - 1}, each once: say, keep={list(range(1, count, 2))[:6]}",
    )
