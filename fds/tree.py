"""Pytrees: nested containers and records of tensors. The only importer of torch.utils._pytree.

Containers are dicts, lists and tuples and classes derived from them, any other `Mapping`, named tuples, attrs classes,
dataclasses, classes declared by `record`, and classes registered with torch's pytree.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar, dataclass_transform, overload

import attrs
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from fds import containers
from fds.containers import ReadOnly as ReadOnly
from fds.errors import FdsError, StateError, did_you_mean

T = TypeVar("T")
Tree = Any
_map = map
class_of, is_dict, is_mapping = containers.class_of, containers.is_dict, containers.is_mapping
is_set, is_sequence = containers.is_set, containers.is_sequence
_DICT: Any = dict  # as Any, since a type checker takes what it has compared with dict for a dict of nothing known
_registering = threading.Lock()
_TENSORS: set[type] = {Tensor, torch.nn.Parameter}
_STRINGS: frozenset[type] = frozenset({str})
_PLAIN: frozenset[type] = frozenset({*_TENSORS, int, float, bool, str, bytes, complex, type(None), torch.dtype})
_LEAF = pytree.tree_structure(0)
_DECLARED: set[type] = set()  # classes declared by `leaf`
_LEAVES: set[type] = set(_PLAIN)  # those, and all other classes that were found to be leaves so far


def _renew() -> None:
    """Replace the lock in the child of a fork, where the thread that held it does not exist."""
    global _registering
    _registering = threading.Lock()


os.register_at_fork(after_in_child=_renew)


def _getter(name: str) -> Callable[[Any], Any]:
    return getattr(Tensor, name).__get__


# For `map` over many tensors: 30 to 70 ns each, half the time of reading the attribute in a loop.
shape_of, dtype_of, device_of, layout_of = _getter("shape"), _getter("dtype"), _getter("device"), _getter("layout")
# torch does not say what its lists are of
values_of: Callable[[Tensor], Any] = Tensor.tolist  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
version_of, grad_of, requires_grad_of = _getter("_version"), _getter("grad"), _getter("requires_grad")


def static(**kwargs: Any) -> Any:
    """Declare a field of a record that is part of the structure, not a child; every copy of the record has the same."""
    return attrs.field(metadata={"role": "static"}, **kwargs)


def fresh(**kwargs: Any) -> Any:
    """Declare a field that `map` and `flatten` reset to its default; `attrs.evolve` keeps its value."""
    return attrs.field(metadata={"role": "fresh"}, **kwargs)


def new(kind: Callable[[], Any], **kwargs: Any) -> Any:
    """Declare a field of an attrs class that begins as a new `kind()`, of the type that the field is annotated with.

    `attrs.field(factory=dict)` says to a type checker that it is a dict of something unknown, and `dict[str, int]` as a
    factory takes seven times as long as `dict`.
    """
    return attrs.field(factory=kind, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(attrs.field, static, fresh))
def record(cls: type[T]) -> type[T]:
    """Make a frozen attrs class and register it as a pytree, with fields as children under their names.

    Fields declared by `static()` or `fresh()` are not children. A method `check(doing)`, if there is one, is called
    before a record is flattened, and may raise.

    >>> @record
    ... class Point:
    ...     x: int
    ...     y: int
    >>> map(lambda v: v + 1, Point(1, 2))
    Point(x=2, y=3)
    """
    frozen = attrs.frozen(eq=False)(cls)
    children = tuple(f.name for f in attrs.fields(frozen) if "role" not in f.metadata)
    fixed = tuple(f.name for f in attrs.fields(frozen) if f.metadata.get("role") == "static")

    check = getattr(frozen, "check", None)

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        if check is not None:
            check(value, "reading its leaves")
        return [getattr(value, name) for name in children], tuple(getattr(value, name) for name in fixed)

    def flatten_with_keys(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        parts, context = flatten(value)
        return [(pytree.GetAttrKey(n), p) for n, p in zip(children, parts, strict=True)], context

    def unflatten(parts: Iterable[Any], context: tuple[Any, ...]) -> Any:
        return frozen(**dict(zip(children, parts, strict=True)), **dict(zip(fixed, context, strict=True)))

    pytree.register_pytree_node(
        frozen,
        flatten,
        unflatten,
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{frozen.__module__}.{frozen.__qualname__}",
    )
    return frozen


def leaf(cls: type[T]) -> type[T]:
    """Declare a class whose instances are leaves, although it is a record."""
    _LEAVES.add(cls)
    _DECLARED.add(cls)
    return cls


def tensor(cls: type[T]) -> type[T]:
    """Declare a tensor subclass, so that its trees are flattened as fast as those of plain tensors."""
    _TENSORS.add(cls)
    return leaf(cls)


def leaves(tree: Tree) -> list[Any]:
    """Return the leaves of `tree` in order (dict entries in insertion order)."""
    return list(tree.values()) if _is_flat(tree) else parts(tree)[0]


@overload
def map(f: Callable[[Any], Any], tree: Tree) -> Tree: ...
@overload
def map(f: Callable[[Any, Any], Any], tree: Tree, other: Tree, /) -> Tree: ...
@overload
def map(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree: ...
def map(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `f` to every leaf and the corresponding subtrees of the trees in `rest`.

    Raises `StateError` for a tree in `rest` of another structure, naming the first place where it differs.
    """
    if type(tree) in _TENSORS and not rest:
        return f(tree)
    first, spec = parts(tree)
    return spec.unflatten(_map(f, first, *(_up_to(spec, tree, other) for other in rest)))


def at_leaves(like: Tree, tree: Tree, what: str) -> list[Any]:
    """Return the subtrees of `tree` that correspond to the leaves of `like`, in the order of those leaves.

    Raises `StateError`, which calls the tree `what`, for another structure, naming the first place where it differs.

    >>> at_leaves({"a": 1, "b": 2}, {"b": [3], "a": 4}, "the other")
    [4, [3]]
    """
    return _up_to(parts(like)[1], like, tree, what)


def copied(tree: Tree) -> Tree:
    """Return a tree of new containers with the same leaves.

    >>> original = {"a": [1, 2]}
    >>> copied(original)["a"].append(3)
    >>> original
    {'a': [1, 2]}
    """
    try:
        return _copied(tree)
    except RecursionError:
        raise _endless(tree) from None


def flatten(tree: Tree) -> tuple[list[Any], Callable[[Iterable[Any]], Tree]]:
    """Return the leaves, and the function that builds a tree of the same structure from other leaves.

    >>> parts, build = flatten({"a": 1, "b": [2, 3]})
    >>> build([v * 10 for v in parts])
    {'a': 10, 'b': [20, 30]}
    """
    if _is_flat(tree):
        return list(tree.values()), _dict_builder(tuple(tree))
    flat, spec = parts(tree)
    return flat, spec.unflatten


def parts(tree: Tree) -> tuple[list[Any], Any]:
    """Return the leaves and the structure of a tree, in one pass."""
    if _is_flat(tree):
        return list(tree.values()), _flat_structure(tuple(tree))
    if type(tree) in _TENSORS:
        return [tree], _LEAF
    if _is_flat_sequence(tree):
        return list(tree), _sequence_structure(type(tree), len(tree))
    if type(tree) is ReadOnly:  # as the tree that it shows, which it may be mapped with
        return parts(tree.mapping)
    try:
        flat, spec = pytree.tree_flatten(tree)
        while not _LEAVES.issuperset(_map(type, flat)) and _register_containers(flat):
            flat, spec = pytree.tree_flatten(tree)
    except RecursionError:
        raise _endless(tree) from None
    return flat, spec


def builder(spec: Any) -> Callable[[Iterable[Any]], Tree]:
    """Return the function that builds a tree from leaves: `spec.unflatten`, or a faster one for flat dicts."""
    names = tuple(spec.context) if spec.type is dict else ()
    flat = names and set(_map(type, names)) <= _STRINGS and spec == _flat_structure(names)
    return _dict_builder(names) if flat else spec.unflatten


def structure(tree: Tree) -> Any:
    """Return the structure of a tree without its leaves: hashable, equal for trees of the same structure."""
    return parts(tree)[1]


def dump_structure(spec: Any) -> str:
    """Return a structure as text for `load_structure`. Raises for containers that torch cannot serialize."""
    return pytree.treespec_dumps(spec)


def load_structure(text: str) -> Any:
    """Return the structure that `dump_structure` wrote.

    >>> load_structure(dump_structure(structure({"a": (1, 2)}))).unflatten([3, 4])
    {'a': (3, 4)}
    """
    return pytree.treespec_loads(text)


def paths(tree: Tree) -> dict[str, Any]:
    """Return the leaves by their dotted key paths, which are names in saves and in errors.

    Raises `StateError` if two leaves have the same path (`{"a.b": x, "a": {"b": y}}`).

    >>> paths({"a": 1, "b": [2, {"c": 3}]})
    {'a': 1, 'b.0': 2, 'b.1.c': 3}
    """
    if _is_flat(tree):
        return dict(tree)
    if type(tree) in _TENSORS:
        return {"": tree}
    if _is_flat_sequence(tree):
        return {str(i): x for i, x in enumerate(tree)}
    if type(tree) is ReadOnly:
        return paths(tree.mapping)
    parts(tree)  # registers its containers
    named: dict[str, Any] = {}
    for keys, x in pytree.tree_flatten_with_path(tree)[0]:
        path = ".".join(_text_of(key) for key in keys)
        if path in named:
            raise StateError("two leaves have the same key path", where=path, hint="rename one of the keys")
        named[path] = x
    return named


def opaque(tree: Tree) -> list[str]:
    """Return the key paths of leaves that contain tensors without being one; classes declared by `leaf` are left out.

    >>> opaque({"a": torch.ones(2), "b": {torch.ones(2)}})
    ['b']
    """
    if _PLAIN.issuperset(_map(type, leaves(tree))):
        return []
    return [path for path, x in paths(tree).items() if _hides(x)]


def _hides(x: object) -> bool:
    return not isinstance(x, Tensor) and type(x) not in _DECLARED and containers.holds_tensors(x)


def match(patterns: Iterable[str], names: Iterable[str], *, what: str) -> set[str]:
    """Return the names that match any of the shell-style patterns (`*` crosses dots).

    Raises `StateError` for a pattern that matches no name; `what` names the caller in it.

    >>> sorted(match(["*.bias"], ["0.weight", "0.bias", "1.bias"], what="freeze"))
    ['0.bias', '1.bias']
    """
    names = list(names)
    matches: set[str] = set()
    for pattern in patterns:
        hits = fnmatch.filter(names, pattern)
        inside = [] if hits else fnmatch.filter(names, f"{pattern}.*")  # where it names modules
        if not hits:
            raise StateError(
                f"{what}: a pattern matches no parameter",
                got=repr(pattern),
                want="the name of a parameter, with * for any part of it",
                hint=f"'{pattern}.*' matches {named(inside)}" if inside else did_you_mean(pattern, names),
            )
        matches.update(hits)
    return matches


def nodes(tree: object) -> list[Any]:
    """Return the containers of a tree that are not empty: dicts, lists, tuples and attrs records; None for any other.

    >>> nodes({"a": [1, {"b": 2}]})
    [{'a': [1, {'b': 2}]}, [1, {'b': 2}], {'b': 2}]
    """
    if _is_flat(tree):
        return [tree]
    inside: list[Any]
    if is_dict(tree):
        inside = list(tree.values())
    elif is_sequence(tree):
        inside = list(tree)
    elif attrs.has(type(tree)) and not hasattr(tree, "__dict__"):  # with a __dict__, code may hold that instead
        inside = [getattr(tree, field.name) for field in attrs.fields(type(tree)) if "role" not in field.metadata]
    else:
        return [None] if type(tree) in pytree.SUPPORTED_NODES and leaves(tree) else []
    return [tree, *(node for child in inside for node in nodes(child))] if inside else []


def named(names: Sequence[str], most: int = 8) -> str:
    """Return names as text; for more than `most`, their number and their common prefixes.

    >>> named(["a", "b"]), named([f"base.{i}.weight" for i in range(148)])
    ('a, b', '148 names: "base.*"')
    """
    if len(names) <= most:
        return ", ".join(names)
    first, last = min(names).split("."), max(names).split(".")
    common = list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    heads = [".".join(word for word, _ in common)] if common else list(dict.fromkeys(n.split(".")[0] for n in names))
    shown = ", ".join(f'"{head}.*"' for head in heads[:4]) + (", ..." if len(heads) > 4 else "")
    return f"{len(names)} names: {shown}"


def is_float(x: Any) -> bool:
    """Say whether a leaf is a floating-point tensor."""
    return isinstance(x, Tensor) and x.is_floating_point()


def is_low(x: Any) -> bool:
    """Say whether a leaf is a 16-bit floating-point tensor."""
    return is_float(x) and x.dtype.itemsize == 2


def num_bytes(tree: Tree) -> int:
    """Return the bytes of all tensors in `tree`."""
    return sum(x.numel() * x.element_size() for x in leaves(tree) if isinstance(x, Tensor))


def _register_containers(leaves: Sequence[object]) -> bool:
    """Register the classes of leaves that are containers of tensors with torch's pytree; say whether there were any."""
    registered = False
    for x in leaves:
        cls = type(x)
        if cls in _LEAVES or cls in pytree.SUPPORTED_NODES:
            continue
        if not containers.is_container(cls):
            _LEAVES.add(cls)
        elif containers.holds_tensors(x) and containers.can_be_built(x):
            _register(cls)
            registered = True
    return registered


def _key_of(cls: type) -> Callable[[Any], Any]:
    if issubclass(cls, Mapping):
        return pytree.MappingKey
    return pytree.SequenceKey if issubclass(cls, list | tuple) else pytree.GetAttrKey


def _register(cls: type[Any]) -> None:
    make = _key_of(cls)

    def flatten_with_keys(x: Any) -> tuple[list[Any], containers.Shell]:
        children, shell = containers.take_apart(x)
        return [(make(key), child) for key, child in zip(shell.keys, children, strict=True)], shell

    with _registering:  # autograd's threads recompute layers, and flatten their arguments
        if cls not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                cls,
                containers.take_apart,
                lambda children, shell: containers.build(shell, children),
                flatten_with_keys_fn=flatten_with_keys,
            )


def _copied(tree: Tree) -> Tree:
    if _is_flat(tree):
        return dict(tree)
    kind = class_of(tree)
    if kind is dict:
        return {key: x if isinstance(x, Tensor) else _copied(x) for key, x in tree.items()}
    if type(tree) in (list, tuple):
        return kind([x if isinstance(x, Tensor) else _copied(x) for x in tree])
    return map(lambda x: x, tree)


def _up_to(spec: Any, like: Tree, tree: Tree, what: str = "") -> list[Any]:
    """Return the subtrees of `tree` that correspond to the leaves of `like`, whose structure is `spec`."""
    like = like.mapping if type(like) is ReadOnly else like
    tree = tree.mapping if type(tree) is ReadOnly else tree
    try:
        return spec.flatten_up_to(tree)
    except FdsError:  # from the `check` of a record
        raise
    except ValueError as error:
        where, got, want = _difference(like, tree) or ("", str(error), "the same structure")
    raise StateError("two trees differ in structure", where=".".join(filter(None, (what, where))), got=got, want=want)


def _difference(like: Tree, tree: Tree, path: str = "") -> tuple[str, str, str] | None:
    """Return the path of the first difference between two trees, what `tree` has there, and what `like` has."""
    (here, spec), (there, other) = _children(like), _children(tree)
    if spec.is_leaf():
        return None
    if other.is_leaf() or (type(like) is not type(tree) and not (isinstance(like, dict) and isinstance(tree, dict))):
        return path, _described(tree), _described(like)
    for name in [*here, *(name for name in there if name not in here)]:
        at = ".".join(filter(None, (path, name)))
        if name not in there or name not in here:
            got, want = (_described(children[name]) if name in children else "nothing" for children in (there, here))
            return at, got, want
        if difference := _difference(here[name], there[name], at):
            return difference
    return None


def _endless(tree: Tree) -> StateError:
    """Return the error for a tree with a container that contains itself, or one deeper than Python's stack."""
    try:
        where = _loop(tree, (), "")
    except RecursionError:
        where = None
    if where is None:
        return StateError("a tree is too deep", got="more nested containers than Python's recursion limit")
    return StateError(
        "a container holds itself",
        where=where,
        got="one of the containers that it is in",
        want="a tree: leaves in containers, each in one place",
    )


def _loop(tree: Tree, above: tuple[Any, ...], path: str) -> str | None:
    """Return the path of a container that contains itself."""
    for name, x in _children(tree)[0].items():
        at = ".".join(filter(None, (path, name)))
        if any(x is container for container in (*above, tree)):
            return at
        if loop := _loop(x, (*above, tree), at):
            return loop
    return None


def _children(tree: Tree) -> tuple[dict[str, Any], Any]:
    """Return the children of the outermost container by name, and its own structure without theirs."""
    spec = pytree.tree_structure(tree, is_leaf=_all_but_the_first())
    children = pytree.tree_leaves_with_path(tree, is_leaf=_all_but_the_first())
    return {_text_of(keys[-1]): x for keys, x in children if keys}, spec


def _all_but_the_first() -> Callable[[Any], bool]:
    first = iter([False])
    return lambda x: next(first, True)


def _described(x: Any) -> str:
    return f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else f"{type(x).__name__} {x!r}"[:60]


def _is_flat(tree: Tree) -> TypeGuard[dict[str, Any]]:
    """Say whether a tree is a dict from names to plain tensors, like the parameters of most models.

    Such a dict is flattened by dict's own methods: 3 ns per leaf, where torch's pytree takes 160.
    """
    if type(tree) is not _DICT:
        return False
    return _TENSORS.issuperset(_map(type, tree.values())) and _STRINGS.issuperset(_map(type, tree))


def _is_flat_sequence(tree: Tree) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Say whether a tree is a tuple or a list of plain tensors, like most batches."""
    return type(tree) in (tuple, list) and _TENSORS.issuperset(_map(type, tree))


@functools.lru_cache(maxsize=64)
def _sequence_structure(kind: type, length: int) -> Any:
    return pytree.tree_structure(kind([0] * length))


@functools.lru_cache(maxsize=64)
def _flat_structure(names: tuple[str, ...]) -> Any:
    return pytree.tree_structure(dict.fromkeys(names, 0))


def _dict_builder(names: tuple[str, ...]) -> Callable[[Iterable[Any]], dict[str, Any]]:
    return lambda leaves: dict(zip(names, leaves, strict=True))


def _text_of(key: Any) -> str:
    for field in ("key", "idx", "name"):
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)
