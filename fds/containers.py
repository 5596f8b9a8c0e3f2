"""Flatten and rebuild containers other than plain dicts, lists and tuples.

These are other mappings, subclasses of list and tuple, attrs classes and dataclasses. A rebuilt container has the same
class and the same other attributes, except those that hold tensors; `__init__` is not called.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
from torch import Tensor, nn

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # of typing from Python 3.13 on; a type checker brings it

_DEPTH = 4  # levels of nested objects in which `holds_tensors` searches


@attrs.frozen(eq=False)
class Shell:
    """A container without its children."""

    keys: tuple[Any, ...]
    empty: Any  # of the same class, with the attributes that are not children
    build: Callable[[Shell, Sequence[Any]], Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shell) and (type(self.empty), self.keys) == (type(other.empty), other.keys)

    def __hash__(self) -> int:
        return hash((type(self.empty), self.keys))


class ReadOnly(Mapping[Any, Any]):
    """What is in another mapping, to be read: mappings in it are shown the same way, lists and tuples as copies.

    Whoever writes into it is refused by `refuse`, a function that returns the error; whoever reads what is not there by
    `missing`, which is given the key and returns a `KeyError`.
    """

    __slots__ = ("mapping", "missing", "refuse")

    def __init__(
        self,
        mapping: Mapping[Any, Any],
        refuse: Callable[[], Exception] = TypeError,
        missing: Callable[[Any], KeyError] = KeyError,
    ):
        self.mapping, self.refuse, self.missing = mapping, refuse, missing

    def __getitem__(self, key: Any) -> Any:
        if key not in self.mapping:
            raise self.missing(key)
        return self._shown(self.mapping[key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.mapping)

    def __len__(self) -> int:
        return len(self.mapping)

    def __repr__(self) -> str:
        return repr(self.mapping)

    def __or__(self, other: Mapping[Any, Any]) -> dict[Any, Any]:
        return {**self, **other}

    def __ror__(self, other: Mapping[Any, Any]) -> dict[Any, Any]:
        return {**other, **self}

    def copy(self) -> dict[Any, Any]:
        """Return a dict of the same, which may be written."""
        return dict(self)

    def _shown(self, x: Any) -> Any:
        if isinstance(x, Mapping):
            return ReadOnly(x, self.refuse, self.missing)
        return type(x)(map(self._shown, x)) if type(x) in (list, tuple) else x

    def _written(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self.refuse()

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = setdefault = clear = _written


def class_of(x: object) -> type[Any]:
    """Return `type(x)`; a type checker then knows that it may be any class."""
    return type(x)


def is_dict(x: object) -> TypeIs[dict[Any, Any]]:
    """Say whether an object is a dict; a type checker then knows that anything may be in it."""
    return isinstance(x, dict)


def is_mapping(x: object) -> TypeIs[Mapping[Any, Any]]:
    """Say the same of any mapping."""
    return isinstance(x, Mapping)


def is_set(x: object) -> TypeIs[set[Any] | frozenset[Any]]:
    """Say the same of sets."""
    return isinstance(x, set | frozenset)


def is_sequence(x: object) -> TypeIs[list[Any] | tuple[Any, ...]]:
    """Say whether an object is a list or a tuple; a type checker then knows that anything may be in it."""
    return isinstance(x, list | tuple)


def is_container(cls: type) -> bool:
    """Return whether `cls` is one of the container classes above."""
    if issubclass(cls, Tensor | nn.Module | enum.Enum | type):
        return False
    return issubclass(cls, Mapping | list | tuple) or attrs.has(cls) or dataclasses.is_dataclass(cls)


def take_apart(x: Any) -> tuple[list[Any], Shell]:
    """Return the children of a container and its `Shell`. Raises what its own methods raise."""
    if isinstance(x, Mapping):
        keys = tuple(x)
        children = [x[key] for key in keys]
        if not isinstance(x, MutableMapping):
            cls: Any = type(x)  # whose constructor takes a dict, as that of a frozen mapping does
            return children, Shell(keys, cls(dict.fromkeys(keys)), _build_constant)
        return children, Shell(keys, _emptied(x, children), _build_mapping)
    if isinstance(x, list | tuple):
        return list(x), Shell(tuple(range(len(x))), _blank(x, getattr(x, "__dict__", {})), _build_sequence)
    names = tuple(name for name in _fields(type(x)) if hasattr(x, name))
    others = {name: value for name, value in getattr(x, "__dict__", {}).items() if name not in names}
    return [getattr(x, name) for name in names], Shell(names, _blank(x, others), _build_record)


def build(shell: Shell, children: Iterable[Any]) -> Any:
    """Return a container of the same kind with these children.

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
    """Return whether a container that is taken apart and rebuilt has the same class, keys and children."""
    try:
        children, shell = take_apart(x)
        rebuilt = build(shell, children)
        again, other = take_apart(rebuilt)
        return type(rebuilt) is type(x) and shell == other and all(a is b for a, b in zip(children, again, strict=True))
    except Exception:  # methods of user classes may raise anything
        return False


def holds_tensors(x: Any, depth: int = _DEPTH) -> bool:
    """Return whether an object contains a tensor: in its items or attributes, or in theirs."""
    if isinstance(x, Tensor):
        return True
    if not depth or x is None or isinstance(x, str | bytes | int | float | complex | type):
        return False
    if isinstance(x, Mapping):
        inside = list(x.values())
    elif isinstance(x, list | tuple | set | frozenset):
        inside = list(x)
    else:
        slots = [name for cls in type(x).__mro__ for name in _slots(cls) if hasattr(x, name)]
        inside = [*getattr(x, "__dict__", {}).values(), *(getattr(x, name) for name in slots)]
    return any(holds_tensors(y, depth - 1) for y in inside)


def _fields(cls: type) -> list[str]:
    return [f.name for f in (attrs.fields(cls) if attrs.has(cls) else dataclasses.fields(cls))]


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _blank(x: Any, others: Mapping[str, Any]) -> Any:
    """Return an empty object of the class of `x` with these attributes, except those that hold tensors."""
    base: Any = next((kind for kind in (tuple, list) if isinstance(x, kind)), object)
    empty = base.__new__(type(x))
    for name, value in others.items():
        if not holds_tensors(value):  # tensors would be derived from the old children: better missing than wrong
            empty.__dict__[name] = value
    return empty


def _emptied(x: MutableMapping[Any, Any], children: Sequence[Any]) -> MutableMapping[Any, Any]:
    """Return a copy of a mapping with all values None. Raises `TypeError` if writing to the copy changes `x`."""
    empty = _shallow_copy(x)
    for key, child in zip(tuple(x), children, strict=True):
        empty[key] = None
        if child is not None and x[key] is None:
            x[key] = child
            raise TypeError(f"a copy of a {type(x).__name__} writes into the original")
    attributes: Any = getattr(empty, "__dict__", {})
    for name, value in [] if attributes is empty else list(attributes.items()):
        if any(isinstance(y, Tensor) for y in (value if isinstance(value, list | tuple) else [value])):
            del attributes[name]  # derived from the old children, as in `_blank`
    return empty


def _shallow_copy(x: Any) -> Any:
    """Return a copy of a mapping that shares none of the dicts and lists in which it may keep its items."""
    copied = copy.copy(x)
    attributes: Any = getattr(x, "__dict__", {})
    if attributes is x:  # its items are its attributes
        object.__setattr__(copied, "__dict__", copied)
        return copied
    slots = {name: getattr(x, name) for cls in type(x).__mro__ for name in _slots(cls) if hasattr(x, name)}
    for name, value in {**slots, **attributes}.items():
        if isinstance(value, MutableMapping | list) and getattr(copied, name, None) is value:
            object.__setattr__(copied, name, copy.copy(value))
    return copied


def _build_mapping(shell: Shell, children: Sequence[Any]) -> Any:
    built = _shallow_copy(shell.empty)
    for key, child in zip(shell.keys, children, strict=True):
        built[key] = child
    return built


def _build_constant(shell: Shell, children: Sequence[Any]) -> Any:
    return type(shell.empty)(dict(zip(shell.keys, children, strict=True)))


def _build_sequence(shell: Shell, children: Sequence[Any]) -> Any:
    empty = shell.empty
    if isinstance(empty, tuple):
        built: Any = tuple.__new__(type(empty), children)
    else:
        built = list.__new__(type(empty))
        list.extend(built, children)
    for name, value in getattr(empty, "__dict__", {}).items():
        built.__dict__[name] = value
    return built


def _build_record(shell: Shell, children: Sequence[Any]) -> Any:
    built = _blank(shell.empty, getattr(shell.empty, "__dict__", {}))
    for name, child in zip(shell.keys, children, strict=True):
        object.__setattr__(built, name, child)
    return built
