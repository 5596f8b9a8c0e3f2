"""Modules of a model that regular expressions name, as patterns of names of parameters.

Source: `compression/compress.py` of DeepSpeed 0.19.6: a group takes all modules with a weight in whose path one of its
regular expressions is found, each at most once in a technique.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from fds import tree
from fds.compression.activations import is_convolution, is_linear
from fds.errors import ConfigError
from fds.loss import Layers, modules_of

ROOT = "compression_training"


@attrs.frozen
class Part:
    """A module with a weight, whose name as a parameter is `weight`.

    Its `kind` is "linear", "transposed" (linear, of a weight (inputs, outputs)), "convolution", "embedding" or "norm".
    """

    path: str
    kind: str
    weight: str
    shape: tuple[int, ...]


@attrs.frozen
class Parts:
    """What regular expressions may name in a model, and all names, which patterns must not match by accident.

    `last` is the path of the last module but for dropout; `factors` are those of MoQ, by patterns of weights whose bits
    fall.
    """

    parts: tuple[Part, ...]
    paths: frozenset[str]
    names: frozenset[str]
    last: str
    factors: Mapping[str, Any] = attrs.field(factory=dict[str, Any])

    @classmethod
    def of(cls, model: nn.Module | Layers) -> Parts:
        """Return those of a module, or of layers, whose paths begin with the name of the layer."""
        parts: list[Part] = []
        paths, names, last = set[str](), set[str](), ""
        for prefix, module, named in _modules(model):
            names.update(prefix + name for name in named.values())
            for path, part in module.named_modules():
                whole = f"{prefix}{path}".rstrip(".")
                paths.add(whole)
                last = last if isinstance(part, nn.Dropout) else whole
                if (kind := _kind(part)) and (weight := named.get(f"{path}.weight".lstrip("."))):
                    shape = tuple(part.get_parameter("weight").shape)
                    parts.append(Part(whole, kind, prefix + weight, shape))
        return cls(tuple(parts), frozenset(paths), frozenset(names), last)


def _modules(model: nn.Module | Layers) -> Iterator[tuple[str, nn.Module, Mapping[str, str]]]:
    """Yield modules, what stands before their names, and of every path of a parameter its name."""
    if isinstance(model, Layers):
        yield from ((x.prefix, x.module, x.paths) for x in modules_of(model))
        return
    first: dict[int, str] = {}  # of tied parameters
    named = model.named_parameters(remove_duplicate=False)
    yield "", model, {path: first.setdefault(id(x), path) for path, x in named}


def _kind(module: nn.Module) -> str:
    if is_linear(module):
        return "linear" if isinstance(module, nn.Linear) else "transposed"
    kinds = {"embedding": nn.Embedding, "norm": nn.BatchNorm2d}
    named = (kind for kind, cls in kinds.items() if isinstance(module, cls))
    return "convolution" if is_convolution(module) else next(named, "")


@attrs.frozen
class Group:
    """A group of a technique: its key path, its parameters, and the modules that it takes; None where nobody knows."""

    path: str
    name: str
    params: Any
    modules: tuple[str, ...]  # regular expressions
    related: tuple[tuple[str, ...], ...]  # for each of them
    named: tuple[tuple[Part, ...], ...] | None  # by each of them

    @property
    def parts(self) -> list[Part] | None:
        """The modules of all regular expressions."""
        return None if self.named is None else list(itertools.chain.from_iterable(self.named))

    def weights(self, model: Parts | None, *kinds: str) -> tuple[str, ...]:
        """Return patterns of the names of its weights."""
        if self.parts is None or model is None:
            return tuple(f"*{guessed_of(word)}*.weight" for word in self.modules)
        return patterns_of([part.weight for part in self.parts if part.kind in kinds], model.names)

    def paths(self, model: Parts | None, *kinds: str) -> tuple[str, ...]:
        """Return patterns of the paths of its modules."""
        if self.parts is None or model is None:
            return tuple(f"*{guessed_of(word)}*" for word in self.modules)
        return patterns_of([part.path for part in self.parts if part.kind in kinds], model.paths)


def groups_of(technique: Any, key: str, model: Parts | None, *kinds: str) -> list[Group]:
    """Return the groups of a technique.

    Raises `ConfigError` for what is no regular expression, one that names no module of these kinds, and a module that
    two name, as DeepSpeed refuses it.
    """
    taken: dict[str, str] = {}
    groups: list[Group] = []
    for name, group in technique.different_groups.items():
        path = f"{ROOT}.{key}.different_groups.{name}"
        words = ("",) if _listed(group.modules) == ("*",) else _listed(group.modules)
        parts = None if model is None else _named(words, model, f"{path}.modules", kinds, taken)
        groups.append(Group(path, name, group.params, words, group.related_modules or (), parts))
    return groups


def _listed(words: str | Sequence[str]) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else tuple(words)


def _of_word(word: str, model: Parts, where: str, kinds: Sequence[str]) -> list[Part]:
    """Return the modules that a regular expression names, which are of these kinds. Raises `ConfigError` for none."""
    try:
        parts = [part for part in model.parts if re.search(word, part.path) and part.kind in kinds]
    except re.error as error:
        raise ConfigError("not a regular expression", where=where, got=repr(word), want=f"one: {error}") from None
    if parts:
        return parts
    raise ConfigError(
        "a group names no module",
        where=where,
        got=repr(word),
        want="a part of the path of a module with a weight",
        hint=f"they are {tree.named([part.path for part in model.parts if part.kind in kinds])}",
    )


def _named(
    words: Iterable[str], model: Parts, where: str, kinds: Sequence[str], taken: dict[str, str]
) -> tuple[tuple[Part, ...], ...]:
    """Return the modules that each regular expression names. Raises `ConfigError` for one that is named twice."""
    named: list[tuple[Part, ...]] = []
    for word in words:
        parts = _of_word(word, model, where, kinds)
        for part in parts:
            if part.path in taken:
                raise ConfigError(
                    "a module is in two groups, or named twice in one",
                    where=where,
                    got=f"{part.path}, which {taken[part.path]} names",
                    want="each module once in a technique",
                )
            taken[part.path] = f"{word!r} of {where}"
        named.append(tuple(parts))
    return tuple(named)


def guessed_of(word: str) -> str:
    """Return a pattern for a regular expression, for those who read it: where there is no module nothing is known."""
    return re.sub(r"\\w[+*]|\.[+*]", "*", word).replace("\\.", ".") if word else ""


_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")  # of a layer, in a name


def _starred(name: str) -> str:
    return _NUMBER.sub("*", glob.escape(name))


def patterns_of(names: Iterable[str], everyones: Iterable[str]) -> tuple[str, ...]:
    """Return patterns that match these names and no other: layers of one list by one pattern, if that can be.

    >>> patterns_of(["h.0.w", "h.1.w", "head"], ["h.0.w", "h.1.w", "h.0.b", "head"])
    ('h.*.w', 'head')
    >>> patterns_of(["h.0.w"], ["h.0.w", "h.1.w"])
    ('h.0.w',)
    """
    names, everyones = dict.fromkeys(names), list(everyones)
    short: dict[str, None] = {}
    for name in names:
        pattern = _starred(name)
        fits = pattern != name and set(fnmatch.filter(everyones, pattern)) <= names.keys()
        short[pattern if fits else glob.escape(name)] = None
    return tuple(short)


def with_related(group: Group, model: Parts | None, kind: str) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return patterns of weights with those of what is related to them, which have as many `*` each.

    Raises `ConfigError` where regular expressions name other numbers of modules than those that they are related to.
    """
    if not group.related:
        return [(group.weights(model, kind), ())]
    if model is None or group.named is None:
        words = (f"*{guessed_of(word)}*.weight" for of_word in group.related for word in of_word)
        return [(group.weights(model, kind), tuple(words))]
    where = f"{group.path}.related_modules"
    sets: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for parts, words in zip(group.named, group.related, strict=False):
        columns = [_of_word(word, model, where, ("linear", "convolution", "norm")) for word in words]
        for word, column in zip(words, columns, strict=True):
            if len(column) != len(parts):
                raise ConfigError(
                    "modules and those that are related to them do not go in pairs",
                    where=where,
                    got=f"{word!r} names {len(column)}, and there are {len(parts)}",
                    want="one for each",
                )
        for i, part in enumerate(parts):
            names = (part.weight, *(column[i].weight for column in columns))
            sets.setdefault(tuple(map(_starred, names)), []).append(names)
    together: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    for (weight, *related), names in sets.items():
        alike = all(len({tuple(_NUMBER.findall(name)) for name in row}) == 1 for row in names)
        if alike and set(fnmatch.filter(model.names, weight)) == {row[0] for row in names}:
            together.append(((weight,), tuple(related)))
        else:
            together += [((row[0],), row[1:]) for row in names]
    return together
