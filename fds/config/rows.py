"""Read records from a table that has one row a key, and the checks of several keys that a table may name.

A table has a line for each record, its rows below that, and reasons that several rows share:

    @mesh: n/a: the mesh says it
    StagesConfig [pipeline(=)]: `stages`: how layers are divided.
        count: int|None = None; ranks; > 0; docs 2; old num_stages | number of stages | @mesh
        names: tuple[str, ...] = () | what layers are called | (partition=): by name
        ! order least most

A row is a key with its type and default, facts of it, what it does, and what it means in fds, as the table of keys
prints that: `part of KEY`, "`call`: NOTE", `function(argument=): NOTE`, `not yet: FEATURE`, `n/a: WHY`. `(=)` is the
argument of the key's name. A row without a meaning has the one in brackets after its record's name, else it is
`part of enabled`; a group has none. Other facts are `no null`, `null as absent` and `flat` (see `Key`), and
`switch OLD`, an old boolean in place of a group. `= a, b` repeats rows above; `! check a b if c` is a check of keys,
made where `c` is true.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal

import attrs

from fds.config.field import Argument, Elsewhere, Meaning, NotApplicable, NotYet, PartOf, key
from fds.config.record import Config, record_of
from fds.errors import ConfigError, is_number

_HEAD = re.compile(r"(\w+)(?:\((\w+)\))?(?: \[(.+?)\])?:(?: (.*))?")
_CALL = re.compile(r"([\w.|]*)\((\w*=?)\)(?:: (.*))?")
_BOUNDS = {">=": "low", "<=": "high", ">": "over", "<": "under"}
_NULL = {"no null": False, "null as absent": True}


def declare(namespace: dict[str, Any], table: str, *modules: ModuleType) -> dict[str, Any]:
    """Add the records of a table to the namespace of a module, and return them by name.

    Args:
        namespace: `globals()`, with what the table refers to: types, `_check_NAME` for `! NAME`, `_switch`, which
            converts an old boolean, and records with methods or a docstring of their own, which get their rows.
        table: the text.
        modules: others whose records it refers to.
    """
    names: dict[str, Any] = {"Any": Any, "Literal": Literal}
    for module in modules:
        names |= vars(module)
    out: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    rows: dict[str, str] = {}
    for head, lines in _blocks(table):
        if head.startswith("@"):
            why, _, reasons[why] = head.partition(": ")
            continue
        name, base, meaning, doc = _HEAD.fullmatch(head).groups()  # type: ignore[union-attr]
        body = {"__doc__": doc, "__module__": namespace["__name__"]}
        cls = namespace.get(name) or type(name, (namespace.get(base, Config),), body)
        usual = reasons.get(meaning, meaning) or "part of enabled"
        names |= namespace
        fields: dict[str, Any] = {}
        for line in lines:
            if line.startswith("! "):
                words, _, switch = line[2:].partition(" if ")
                check, *paths = words.split()
                cls.checks += ((_CHECKS.get(check) or namespace[f"_check_{check}"], paths, switch),)
                continue
            for row in [rows[field] for field in line[2:].split(", ")] if line.startswith("= ") else [line]:
                rows[row.partition(":")[0]] = row
                fields |= _field(row, usual, reasons, names)
        namespace[name] = out[name] = attrs.frozen(cls, these=fields, slots=False)
    return out


def _blocks(table: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the unindented lines of a table, each with those below it; deeper lines continue the one above."""
    lines: list[list[str]] = []
    for line in filter(None, table.splitlines()):
        indent = len(line) - len(line.lstrip())
        if indent == 0:
            lines.append([line])
        elif indent == 4:
            lines[-1].append(line.strip())
        else:
            lines[-1][-1] += f" {line.strip()}"
    yield from ((head, rest) for head, *rest in lines)


def _field(row: str, usual: str, reasons: dict[str, str], names: dict[str, Any]) -> dict[str, Any]:
    head, doc, *stated = row.split(" | ")
    declaration, *facts = head.split("; ")
    name, _, declaration = declaration.partition(": ")
    annotation, _, default = declaration.partition(" = ")
    type_ = eval(annotation, names)  # of a table of this package alone
    group = record_of(type_)
    options: dict[str, Any] = {"unit": ""}
    for fact in facts:
        word, _, value = fact.partition(" ")
        if word in _BOUNDS:
            options[_BOUNDS[word]] = json.loads(value)
        elif word == "docs":
            options["documented"] = ast.literal_eval(value)
        elif word == "old":
            options["old"] = tuple(value.split(", "))
        elif word == "switch":
            options["old"] = dict.fromkeys(value.split(", "), names["_switch"])
        elif fact in _NULL:
            options["null"] = _NULL[fact]
        elif fact == "flat":
            options["flat"] = True
        else:
            options["unit"] = fact
    text = reasons.get(stated[0], stated[0]) if stated else None if group else usual
    value = ast.literal_eval(default) if default else group
    meaning = None if text is None else _meaning(text, name, usual.partition("(")[0])
    return {name: key(dict if value == {} else value, doc, meaning, type=type_, **options)}


def _meaning(text: str, name: str, functions: str) -> Meaning:
    """Return what a key of this name means, in words; `functions` are those of its record."""
    if text.startswith("`"):
        call, _, note = text[1:].partition("`")
        return Elsewhere(call, note.removeprefix(": "))
    if call := _CALL.fullmatch(text):
        of, argument, note = call.groups()
        return Argument(tuple((of or functions).split("|")), name if argument == "=" else argument[:-1], note or "")
    kind, _, rest = text.partition(": ")
    if kind == "n/a":
        return NotApplicable(rest)
    if kind == "not yet":
        return NotYet(rest)
    if kind.startswith("not yet but for "):
        return NotYet(rest, ast.literal_eval(f"({kind.removeprefix('not yet but for ')},)"))
    return PartOf(text.removeprefix("part of "))


class MissingKeyError(ConfigError):
    """Refuse a configuration without a key that it needs; `where` has the path of the key."""


def contradiction(config: Config, what: str, *paths: str, want: str) -> ConfigError:
    """Return an error that shows the paths, below a record, and the values of keys that contradict each other."""
    got = ", ".join(f"{path}={_at(config, path)!r}" for path in paths)
    return ConfigError(what, where=", ".join(paths), got=got, want=want)


def check_order(config: Config, low: str, high: str) -> None:
    """Raise `ConfigError` if both keys are numbers and the first is larger."""
    least, most = config[low], config[high]
    if is_number(least) and is_number(most) and least > most:
        raise contradiction(config, "the lower bound is above the upper", low, high, want=f"{low} <= {high}")


def check_length(config: Config, count: str, listed: str) -> None:
    """Raise `ConfigError` if a key is not the length of the list in another."""
    number, items = config[count], config[listed]
    if is_number(number) and isinstance(items, tuple) and number != len(items):
        raise contradiction(config, "the list has the wrong length", count, listed, want=f"{count} = len({listed})")


def check_needed(config: Config, switch: str, *needed: str) -> None:
    """Raise `ConfigError` if a switch is on and a key that it needs is null or empty."""
    absent = [path for path in needed if _at(config, path) in (None, (), {})]
    if config[switch] is True and absent:
        error = contradiction(
            config,
            "a feature is enabled without the keys that it needs",
            switch,
            *absent,
            want=f"{' and '.join(absent)} where {switch} is true",
        )
        raise MissingKeyError(error.what, where=error.where, got=error.got, want=error.want)


def _at(config: Config, path: str) -> Any:
    """Return the value at a path, which may contain names of groups: `different_groups.wq1.params.start_bits`."""
    value: Any = config
    for name in path.split("."):
        value = value[name]
    return value


_CHECKS = {"order": check_order, "length": check_length, "needed": check_needed}
