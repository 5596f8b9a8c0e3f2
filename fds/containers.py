"""Containers that are neither plain dicts, lists nor tuples: taken apart into children, and built again of others.

Mappings, classes derived from list and tuple, attrs classes and dataclasses. What is built is of the same class and has
the same other attributes, but for those that hold tensors; `__init__` is not run.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import attrs
from torch import Tensor, nn

_DEPTH = 4  # of objects inside objects that are looked into for tensors


@attrs.frozen(eq=False)
class Shell:
    """A container without its children."""

    keys: tuple
    empty: Any  # of the same class, and with what is not a child
    build: Callable[[Shell, Sequence], Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shell) and (type(self.empty), self.keys) == (type(other.empty), other.keys)

    def __hash__(self) -> int:
        return hash((type(self.empty), self.keys))


def is_container(cls: type) -> bool:
    """Say whether `cls` is a container of the kinds above."""
    if issubclass(cls, Tensor | nn.Module | enum.Enum | type):
        return False
    return issubclass(cls, Mapping | list | tuple) or attrs.has(cls) or dataclasses.is_dataclass(cls)


def take_apart(x: Any) -> tuple[list, Shell]:
    """Return the children of a container, and what builds one like it. Raises what its own methods raise."""
    if isinstance(x, Mapping):
        keys = tuple(x)
        children = [x[key] for key in keys]
        if not isinstance(x, MutableMapping):
            return children, Shell(keys, type(x)(dict.fromkeys(keys)), _build_constant)  # type: ignore[call-arg]
        return children, Shell(keys, _emptied(x, children), _build_mapping)
    if isinstance(x, list | tuple):
        return list(x), Shell(tuple(range(len(x))), _blank(x, getattr(x, "__dict__", {})), _build_sequence)
    names = tuple(name for name in _fields(type(x)) if hasattr(x, name))
    others = {name: value for name, value in getattr(x, "__dict__", {}).items() if name not in names}
    return [getattr(x, name) for name in names], Shell(names, _blank(x, others), _build_record)


def build(shell: Shell, children: Iterable) -> Any:
    """Return a container with other children.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Pair:
    ...     left: int
    ...     right: int
    >>> children, shell = take_apart(Pair(1, 2))
    >>> build(shell, [10 * x for x in children])
    Pair(left=10, right=20)
    """
    return shell.build(shell, list(children))


def can_be_built(x: Any) -> bool:
    """Say whether a container can be taken apart and comes back with its class and its keys."""
    try:
        children, shell = take_apart(x)
        made = build(shell, children)
        again, other = take_apart(made)
        return type(made) is type(x) and shell == other and all(a is b for a, b in zip(children, again, strict=True))
    except Exception:  # whatever the methods of others raise
        return False


def holds_tensors(x: Any, depth: int = _DEPTH) -> bool:
    """Say whether there is a tensor in an object: in its items, its attributes, or theirs."""
    if isinstance(x, Tensor):
        return True
    if not depth or x is None or isinstance(x, str | bytes | int | float | complex | type):
        return False
    if isinstance(x, Mapping):
        found = list(x.values())
    elif isinstance(x, list | tuple | set | frozenset):
        found = list(x)
    else:
        slots = [name for cls in type(x).__mro__ for name in _slots(cls) if hasattr(x, name)]
        found = [*getattr(x, "__dict__", {}).values(), *(getattr(x, name) for name in slots)]
    return any(holds_tensors(y, depth - 1) for y in found)


def _fields(cls: type) -> list[str]:
    return [f.name for f in (attrs.fields(cls) if attrs.has(cls) else dataclasses.fields(cls))]


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _blank(x: Any, others: Mapping[str, Any]) -> Any:
    """Return an empty object of the class of `x` with these attributes, but for those that hold tensors."""
    base: Any = next((kind for kind in (tuple, list) if isinstance(x, kind)), object)
    made = base.__new__(type(x))
    for name, value in others.items():
        if not holds_tensors(value):  # derived from children that are others now: it had better be missing
            made.__dict__[name] = value
    return made


def _emptied(x: MutableMapping, children: Sequence) -> MutableMapping:
    """Return a mapping of the same keys without values. Raises `TypeError` where that would empty `x` too."""
    empty = _twin(x)
    for key, child in zip(tuple(x), children, strict=True):
        empty[key] = None
        if child is not None and x[key] is None:
            x[key] = child
            raise TypeError(f"a copy of a {type(x).__name__} writes into the original")
    own: Any = getattr(empty, "__dict__", {})
    for name, value in [] if own is empty else list(own.items()):
        if any(isinstance(y, Tensor) for y in (value if isinstance(value, list | tuple) else [value])):
            del own[name]  # derived from children that are others now, as in `_blank`
    return empty


def _twin(x: Any) -> Any:
    """Return a copy of a mapping with a dict or list of its own wherever the mapping has one."""
    made = copy.copy(x)
    attributes: Any = getattr(x, "__dict__", {})
    if attributes is x:  # its items are its attributes
        object.__setattr__(made, "__dict__", made)
        return made
    slots = {name: getattr(x, name) for cls in type(x).__mro__ for name in _slots(cls) if hasattr(x, name)}
    for name, value in {**slots, **attributes}.items():
        if isinstance(value, MutableMapping | list) and getattr(made, name, None) is value:
            object.__setattr__(made, name, copy.copy(value))
    return made


def _build_mapping(shell: Shell, children: Sequence) -> Any:
    made = _twin(shell.empty)
    for key, child in zip(shell.keys, children, strict=True):
        made[key] = child
    return made


def _build_constant(shell: Shell, children: Sequence) -> Any:
    return type(shell.empty)(dict(zip(shell.keys, children, strict=True)))


def _build_sequence(shell: Shell, children: Sequence) -> Any:
    empty = shell.empty
    if isinstance(empty, tuple):
        made: Any = tuple.__new__(type(empty), children)
    else:
        made = list.__new__(type(empty))
        list.extend(made, children)
    for name, value in getattr(empty, "__dict__", {}).items():
        made.__dict__[name] = value
    return made


def _build_record(shell: Shell, children: Sequence) -> Any:
    made = _blank(shell.empty, getattr(shell.empty, "__dict__", {}))
    for name, child in zip(shell.keys, children, strict=True):
        object.__setattr__(made, name, child)
    return made
