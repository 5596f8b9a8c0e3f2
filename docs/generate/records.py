"""What griffe cannot see in fds: records of attrs with comments on their fields, transforms, cards.

An extension of griffe, for mkdocstrings. A record gets the signature of its constructor, and a table of its fields
with the comments that stand behind them. A factory marked `@transform` returns a `Transform`, and its page shows the
card of its file.
"""

from __future__ import annotations

import ast
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
    """Return the card of a transform, on top of its file."""
    is_transform = member.is_function and str(getattr(member, "returns", "")) == "Transform"
    card = (
        docstrings.card(member.module.docstring.value, member.name) if is_transform and member.module.docstring else ""
    )
    return f"\n\n{card}" if card else ""


def _is_record(record: griffe.Class) -> bool:
    made = [str(decorator.value).partition("(")[0] for decorator in record.decorators]
    return any(re.fullmatch(r"(attrs\.)?(frozen|define|mutable)|(tree\.)?record", name) for name in made)


def _fields(record: griffe.Class) -> dict[str, griffe.Attribute]:
    """Return the fields of a record with those that it inherits, in the order of its constructor."""
    found: dict[str, griffe.Attribute] = {}
    for base in [*reversed(record.mro()), record]:
        for name, member in base.members.items():
            is_field = isinstance(member, griffe.Attribute) and "property" not in member.labels
            if (
                is_field
                and member.annotation
                and not str(member.annotation).removeprefix("typing.").startswith("ClassVar")
            ):
                found[name] = member
    return found


def _constructor(record: griffe.Class, fields: dict[str, griffe.Attribute]) -> griffe.Function:
    keyword_only = any("kw_only=True" in str(decorator.value) for decorator in record.decorators)
    parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
    for name, field in fields.items():
        value = str(field.value) if field.value is not None else None
        if value and ("init=False" in value or (name[0] == "_" and "default=" in value)):
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
    """Return the default of a field as one would write it, or None where there is none.

    That of `attrs.field(...)`, `tree.fresh(...)`, `tree.new(...)`, of a key of the configuration, and of a setting with
    its validator.
    """
    call = _call(value)
    if call is None:
        return value
    name = ast.unparse(call.func).rpartition(".")[2]
    if name == "_setting":
        return ast.unparse(call.args[1]) if len(call.args) > 1 else None
    if name == "new":
        return f"{ast.unparse(call.args[0])}()"
    if name not in ("field", "static", "fresh", "key"):
        return value
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    given = call.args[0] if call.args else keywords.get("default")
    factory = keywords.get("factory")
    if isinstance(factory, ast.Name | ast.Attribute):
        return f"{ast.unparse(factory)}()"
    if factory or (isinstance(given, ast.Call) and "Factory" in ast.unparse(given.func)):
        return "..."
    return ast.unparse(given) if given else None


def _call(value: str | None) -> ast.Call | None:
    """Return the call that makes a field's value, or None where it is no call."""
    node = ast.parse(value, mode="eval").body if value else None
    return node if isinstance(node, ast.Call) else None


def _document(record: griffe.Class, fields: dict[str, griffe.Attribute]) -> None:
    """Add a table of the public fields with their comments, or types to the table that the docstring has."""
    text = record.docstring.value if record.docstring else ""
    shown = {name: field for name, field in fields.items() if name[0] != "_"}
    types = {name: field.annotation or field.value for name, field in shown.items()}
    if "\nAttributes:" in text:
        head, section, rows = text.partition("\nAttributes:")
        for name in types:
            rows = re.sub(
                rf"^    {name}:", lambda _, name=name: f"    {name} ({types[name]}):", rows, flags=re.MULTILINE
            )
        record.docstring = griffe.Docstring(head + section + rows, parent=record)
    elif shown and "\nArgs:" not in text and "\n=====" not in text:
        rows = [f"    {name} ({types[name]}): {_comment(field) or '&nbsp;'}" for name, field in shown.items()]
        record.docstring = griffe.Docstring("\n".join([text, "", "Attributes:", *rows]), parent=record)
    for name in [name for name in shown if name in record.members]:
        record.del_member(name)


def _comment(field: griffe.Attribute) -> str:
    """Return the comment behind a field, which says its shape, unit or meaning; of a key, what it does."""
    if field.docstring:
        return field.docstring.value.replace("\n", " ")
    call = _call(str(field.value) if field.value else None)
    if call and ast.unparse(call.func) == "key" and len(call.args) > 1 and isinstance(call.args[1], ast.Constant):
        return str(call.args[1].value)
    lines = [re.split(r"\s{2,}#\s", line) for line in (field.source or "").splitlines()]
    return next((line[1] for line in lines if len(line) > 1), "")


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
