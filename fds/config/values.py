"""Strict conversion of JSON values to types: true is not a number, 1 is not true, "5" is not 5, 5e8 is an integer."""

from __future__ import annotations

import copy
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import cattrs

from fds.errors import is_number


def convert(value: Any, type_: Any) -> Any:
    """Convert a JSON value to a type: a list to a tuple, 5e8 to an int. Raises `TypeError`."""
    try:
        return _converter.structure(value, type_)
    except _CONVERSION_ERRORS:
        raise TypeError(value) from None


def is_union(type_: Any) -> bool:
    """Return whether a type is a union."""
    return typing.get_origin(type_) in (types.UnionType, typing.Union)


def describe_type(type_: Any, *, null: bool = True) -> str:
    """Return a type in words, for error messages; without null if that is not accepted."""
    if is_union(type_):
        return " or ".join(describe_type(one) for one in typing.get_args(type_) if null or one is not types.NoneType)
    if typing.get_origin(type_) is Literal:
        return " or ".join(map(repr, typing.get_args(type_)))
    if typing.get_origin(type_) is tuple:
        of = typing.get_args(type_)
        return f"a list of {'' if of[-1] is Ellipsis else f'{len(of)} x '}{describe_type(of[0])}"
    if attrs.has(type_):
        return "an object"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", types.NoneType: "null"}
    return names.get(type_, "an object" if typing.get_origin(type_) is dict else str(type_))


def _check(valid: bool, value: Any) -> Any:
    if not valid:
        raise TypeError(value)
    return value


def _literal(value: Any, type_: Any) -> Any:
    options = typing.get_args(type_)
    equal = [one for one in options if one == value and isinstance(one, bool) == isinstance(value, bool)]
    return _check(bool(equal), equal)[0]


_CONVERSION_ERRORS = (ValueError, TypeError, OverflowError, cattrs.BaseValidationError)
_converter = cattrs.Converter()
_converter.register_structure_hook(bool, lambda v, _: _check(isinstance(v, bool), v))
_converter.register_structure_hook(str, lambda v, _: _check(isinstance(v, str), v))
_converter.register_structure_hook(float, lambda v, _: _check(is_number(v) and abs(float(v)) >= 0, v))
_converter.register_structure_hook(int, lambda v, _: int(_check(is_number(v) and int(v) == v, v)))


def _union(value: Any, type_: Any) -> Any:
    for option in typing.get_args(type_):
        if option is types.NoneType:
            if value is None:
                return None
            continue
        try:
            return _converter.structure(value, option)
        except _CONVERSION_ERRORS:
            continue
    raise TypeError(value)


def _tuple(value: Sequence[Any], types_: tuple) -> tuple:
    if types_[-1] is not Ellipsis:
        _check(len(value) == len(types_), value)
    return tuple(_converter.structure(x, types_[0]) for x in value)


def _dict(value: Any, type_: Any) -> dict[str, Any]:
    of = typing.get_args(type_)[1]
    return {
        _converter.structure(name, str): copy.deepcopy(x) if of is Any else _converter.structure(x, of)
        for name, x in _check(isinstance(value, Mapping), value).items()
    }


_converter.register_structure_hook_func(is_union, _union)
_converter.register_structure_hook_func(lambda t: typing.get_origin(t) is Literal, _literal)
_converter.register_structure_hook_func(lambda t: typing.get_origin(t) is dict, _dict)
_converter.register_structure_hook_func(
    lambda t: typing.get_origin(t) is tuple,
    lambda v, t: _tuple(_check(isinstance(v, list | tuple), v), typing.get_args(t)),
)
