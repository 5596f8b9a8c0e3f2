"""What griffe cannot see in fds: records of attrs with comments on their fields, transforms, cards.

An extension of griffe, for mkdocstrings. A record gets the signature of its constructor, and a table of its fields
with the comments that stand behind them. A factory marked `@transform` returns a `Transform`, and its page shows the
card of its file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import docstrings
import griffe
import public

HOOKS = {"forward", "backward", "setup_context", "vmap", "jvp"}  # torch calls them; the class says what they do


class Records(griffe.Extension):
    """Complete what is read from the sources of fds."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Visit every object of the package once all are loaded."""
        members = list(_inside(pkg))
        fields = {member.path: _fields(member) for member in members if isinstance(member, griffe.Class)}
        for member in members:
            if isinstance(member, griffe.Class):
                _complete_class(member, fields[member.path])
            elif isinstance(member, griffe.Function):
                _complete_function(member)
            if member.docstring and not isinstance(member, griffe.Module):
                text = docstrings.markdown(member.docstring.value, _room(member), _own(member))
                member.docstring.value = text + _card(member)


def _inside(parent: griffe.Module | griffe.Class) -> Iterator[griffe.Object]:
    for member in list(parent.members.values()):
        if not member.is_alias:
            if isinstance(member, griffe.Module | griffe.Class):
                yield from _inside(member)
            yield member


def _complete_class(record: griffe.Class, fields: dict[str, griffe.Attribute]) -> None:
    for name in HOOKS & record.members.keys():
        if not record.members[name].has_docstring:
            record.del_member(name)
    if any(str(base) in ("Enum", "enum.Enum") for base in record.bases):
        _document(record, {name: it for name, it in record.members.items() if isinstance(it, griffe.Attribute)})
    elif _is_record(record):
        if "__init__" not in record.members:
            record["__init__"] = _constructor(record, fields)
        _document(record, fields)


def _complete_function(function: griffe.Function) -> None:
    decorators = [decorator.callable_path.rpartition(".")[2] for decorator in function.decorators]
    if "transform" in decorators and function.returns is None:
        function.returns = griffe.ExprName("Transform", parent=function.parent)


def _card(member: griffe.Object) -> str:
    """Return the card of the file, for the transform that it holds."""
    is_transform = member.is_function and str(getattr(member, "returns", "")) == "Transform"
    card = docstrings.card(member.module.docstring.value) if is_transform and member.module.docstring else ""
    return f"\n\n{card}" if card else ""


def _is_record(record: griffe.Class) -> bool:
    made = [str(decorator.value).partition("(")[0] for decorator in record.decorators]
    return any(re.fullmatch(r"(attrs\.)?(frozen|define|mutable)|(tree\.)?record", name) for name in made)


def _fields(record: griffe.Class) -> dict[str, griffe.Attribute]:
    """Return the fields of a record with those that it inherits, in the order of its constructor."""
    found: dict[str, griffe.Attribute] = {}
    for base in [*reversed(record.mro()), record]:
        for name, member in base.members.items():
            annotated = isinstance(member, griffe.Attribute) and member.annotation is not None
            if annotated and not str(member.annotation).removeprefix("typing.").startswith("ClassVar"):
                found[name] = member
    return found


def _constructor(record: griffe.Class, fields: dict[str, griffe.Attribute]) -> griffe.Function:
    keyword_only = any("kw_only=True" in str(decorator.value) for decorator in record.decorators)
    parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
    for name, field in fields.items():
        value = str(field.value) if field.value is not None else None
        if value and "init=False" in value:
            continue
        kind = griffe.ParameterKind.positional_or_keyword
        if keyword_only or (value and "kw_only=True" in value):
            kind = griffe.ParameterKind.keyword_only
        parameters.append(
            griffe.Parameter(name.lstrip("_"), annotation=field.annotation, kind=kind, default=_default(value))
        )
    parameters.sort(key=lambda parameter: parameter.kind is griffe.ParameterKind.keyword_only)
    return griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=record, lineno=record.lineno)


def _default(value: str | None) -> str | None:
    """Return the default of a field as one would write it: that of `attrs.field(...)`, `tree.fresh(...)`, or itself."""
    if value is None or not re.match(r"((attrs\.)?field|(tree\.)?(static|fresh))\(", value):
        return value
    given = re.search(r"\b(default|factory)=(.+?)(?=, \w+=|\)$)", value)
    if not given:
        first = re.match(r"[\w.]+\((?!\w+=)(.+?)(?=, \w+=|\)$)", value)
        return first[1] if first else None
    if given[1] == "default":
        return given[2]
    return f"{given[2]}()" if re.fullmatch(r"[\w.]+", given[2]) else "..."


def _document(record: griffe.Class, fields: dict[str, griffe.Attribute]) -> None:
    """Add a table of the public fields that the docstring does not list itself, each with its comment."""
    text = record.docstring.value if record.docstring else ""
    shown = {name: field for name, field in fields.items() if name[0] != "_"}
    if shown and "\nAttributes:" not in text and "\nArgs:" not in text:
        rows = [
            f"    {name} ({field.annotation or field.value}): {_comment(field) or '&nbsp;'}"
            for name, field in shown.items()
        ]
        record.docstring = griffe.Docstring("\n".join([text, "", "Attributes:", *rows]), parent=record)
    for name in [name for name in shown if name in record.members]:
        record.del_member(name)


def _comment(field: griffe.Attribute) -> str:
    """Return the comment behind a field, which says its shape, unit or meaning."""
    if field.docstring:
        return field.docstring.value.replace("\n", " ")
    line = field.source.splitlines()[-1] if field.source else ""
    return re.split(r"\s{2,}#\s", line, maxsplit=1)[1] if re.search(r"\s{2,}#\s", line) else ""


def _room(member: griffe.Object) -> str:
    inside = [room for room in public.ROOMS if f"{member.path}.".startswith(f"{room}.")]
    return max(inside, key=len, default="fds")


def _own(member: griffe.Object) -> set[str]:
    own = {member.name}
    if isinstance(member, griffe.Function):
        own.update(parameter.name for parameter in member.parameters)
    if isinstance(member, griffe.Class):
        own.update(member.members)
        if "__init__" in member.members and isinstance(member["__init__"], griffe.Function):
            own.update(parameter.name for parameter in member["__init__"].parameters)
    return own
