"""Under which names whole weights are handed out, and which of them: what `Step.weights` takes as `names`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
from torch import Tensor

from fds import tree
from fds.errors import StateError, is_a

Made = list[tuple[str, Tensor]]
FORMS = "None, patterns, or a dict of patterns to a name, several names, None or a function (tensor) -> {name: tensor}"


@attrs.frozen
class Renamed:
    """What becomes of one weight: the names under which it is handed out, and what makes the tensors."""

    names: tuple[str, ...]
    make: Callable[[Tensor], Any] | None = None  # None: each name has all of it

    def made(self, name: str, x: Tensor) -> Made:
        """Return tensors by name. Raises `StateError` for others than were planned."""
        if self.make is None:
            return [(new, x) for new in self.names]
        made = _pairs(name, self.make(x))
        if tuple(new for new, _ in made) != self.names:
            raise StateError(
                "weights: a function of names returns others than it did before",
                where=name,
                got=tree.named([new for new, _ in made]),
                want=tree.named(self.names),
                hint="names follow from the shape alone",
            )
        return made


def renamed(names: Any, metas: Mapping[str, Tensor]) -> tuple[dict[str, Renamed], dict[str, Tensor]]:
    """Return what becomes of the weights that are handed out, by name, and by new name what they are like on `meta`.

    Raises `StateError` for a pattern that matches nothing, two weights under one name, and what is no form of names.
    """
    chosen = _chosen(names, metas)
    likes: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for name, become in chosen.items():
        for new, x in become.made(name, metas[name]):
            if new in likes:
                raise StateError(
                    "weights: two have one name", where=new, got=f"{origin[new]} and {name}", want="a name of its own"
                )
            likes[new], origin[new] = x.to("meta"), name
    return chosen, likes


def _chosen(names: Any, metas: Mapping[str, Tensor]) -> dict[str, Renamed]:
    """Return what becomes of each weight that is chosen, in the order of `metas`."""
    if names is None:
        return {name: Renamed((name,)) for name in metas}
    if is_a(names, str):
        names = [names]
    rules: Any = names if tree.is_mapping(names) else dict.fromkeys(names) if _is_patterns(names) else None
    if rules is None or not all(is_a(pattern, str) for pattern in rules):
        raise StateError("weights: these are no names", where="names", got=repr(names)[:80], want=FORMS)
    tree.match(rules, metas, what="weights: names")
    chosen: dict[str, Renamed] = {}
    for name, x in metas.items():
        pattern = next((p for p in rules if fnmatch.fnmatchcase(name, p)), None)
        if pattern is None:
            continue
        become = Renamed((name,)) if rules is not names else _become(pattern, rules[pattern], name, x)
        if become is not None:
            chosen[name] = become
    return chosen


def _is_patterns(names: Any) -> bool:
    return (is_a(names, list | tuple) or tree.is_set(names)) and all(is_a(x, str) for x in names)


def _become(pattern: str, value: Any, name: str, x: Tensor) -> Renamed | None:
    """Return what a rule of a dict makes of a weight, None where it leaves it out."""
    if value is None:
        return None
    if callable(value):
        return Renamed(tuple(new for new, _ in _pairs(name, value(x))), value)
    several = [value] if is_a(value, str) else value
    if not (is_a(several, list | tuple) and several and all(is_a(new, str) and new for new in several)):
        raise StateError("weights: this is no name", where=f"names[{pattern!r}]", got=repr(value)[:80], want=FORMS)
    return Renamed(tuple(_filled(pattern, new, name) for new in several))


def _filled(pattern: str, new: str, name: str) -> str:
    """Return a new name, each `*` of which stands for what the one of the pattern matched."""
    if "*" not in new:
        return new
    if new.count("*") != pattern.count("*") or set("?[") & set(pattern):
        raise StateError(
            "weights: a new name has other stars than its pattern",
            where=f"names[{pattern!r}]",
            got=repr(new),
            want=f"as many * as the pattern has, {pattern.count('*')}, or none",
        )
    match = re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), name, re.DOTALL)
    assert match is not None
    parts = iter(match.groups())
    return "".join(next(parts) if word == "*" else word for word in re.split(r"(\*)", new))


def _pairs(name: str, made: Any) -> Made:
    """Return what a function of names made, in order. Raises `StateError` for anything but tensors by name."""
    pairs: Any = [*made.items()] if tree.is_mapping(made) else [*made] if is_a(made, Iterable) else [made]
    good = all(is_a(pair, tuple) and len(pair) == 2 and is_a(pair[0], str) and is_a(pair[1], Tensor) for pair in pairs)
    if not good:
        raise StateError(
            "weights: a function of names returns tensors by name",
            where=name,
            got=repr(made)[:80],
            want="{name: tensor}",
        )
    return pairs
