"""The JSON Schema for editors, and the page of all keys, docs/config-keys.md, both generated from the records.

The schema covers single keys: type, range, choices, spelling. Conditions on several keys (batch sizes that multiply,
options of a ZeRO stage) are checked by the records only.

Source: JSON Schema, draft 2020-12, json-schema.org/draft/2020-12.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from fds.config.decisions import CONTRADICTIONS, INTENDED
from fds.config.field import AUTO, COMMENT, Key, NotYet, flat_keys, keys, same
from fds.config.keys import optimizer
from fds.config.record import Config, record_of
from fds.config.training import TrainingConfig

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", types.NoneType: "null", Any: None}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of what `TrainingConfig.of` accepts; records are in its `$defs`."""
    records: dict[str, dict[str, Any]] = {}
    whole = _record(TrainingConfig, records)
    zero = whole["properties"]["zero_optimization"]
    reference = {"$ref": zero.pop("$ref")}
    zero["anyOf"] = [reference, {"type": "boolean", "deprecated": True, "description": "Old: write an object"}]
    _add_types(records, optimizer.OptimizerConfig, optimizer.OPTIMIZERS, {}, of_optimizer=True)
    _add_types(records, optimizer.SchedulerConfig, optimizer.SCHEDULERS, optimizer.REQUIRED, of_optimizer=False)
    return {"$schema": DRAFT, "title": "DeepSpeed's configuration, as fds reads it", **whole, "$defs": records}


def options(type_: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas of the alternatives of a type; none for `Any`."""
    origin, of = typing.get_origin(type_), typing.get_args(type_)
    if origin in (types.UnionType, typing.Union):
        for alternative in of:
            yield from options(alternative)
    elif origin is Literal:
        yield {"enum": list(of)}
    elif origin is tuple:
        size = {} if of[-1] is Ellipsis else {"minItems": len(of), "maxItems": len(of)}
        yield {"type": "array", "items": _one_of(list(options(of[0]))), **size}
    elif origin is dict:
        values = _one_of(list(options(of[1])))
        yield {"type": "object"} | ({"additionalProperties": values} if values else {})
    elif isinstance(type_, type) and issubclass(type_, Config):
        yield {"$ref": f"#/$defs/{type_.__name__}"}
    elif _TYPES[type_] is not None:
        yield {"type": _TYPES[type_]}


def alternatives(type_: Any, key: Key) -> list[dict[str, Any]]:
    """Return the schemas of the alternatives of a key, including null if the JSON may contain it."""
    schemas = list(options(type_))
    if key.null is None:
        return schemas
    return [schema for schema in schemas if schema != {"type": "null"}] + [{"type": "null"}] * key.null


def _record(cls: type[Config], records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    fields = flat_keys(cls)
    out = {
        "type": "object",
        "description": _first_line(cls),
        "properties": {},
        "patternProperties": {COMMENT: True},
        "additionalProperties": False,
    }
    for name, (type_, key) in fields.items():
        out["properties"][name] = _key(type_, key)
        _add(type_, records)
    old = {spelling: name for name, (_, key) in fields.items() for spelling in key.old if spelling not in fields}
    for spelling, name in old.items():
        out["properties"][spelling] = _old(name, spelling, *fields[name])
    if old:
        out["dependentSchemas"] = {
            spelling: {
                "properties": {
                    other: False for other in (name, *(o for o in old if old[o] == name)) if other != spelling
                }
            }
            for spelling, name in old.items()
        }
    return out


def _add(type_: Any, records: dict[str, dict[str, Any]]) -> None:
    record = record_of(type_)
    if record is not None and record.__name__ not in records:
        records[record.__name__] = {}  # reserves its position before the records below it
        records[record.__name__] |= _record(record, records)
    for argument in typing.get_args(type_) if record is None else ():
        _add(argument, records)


def _key(type_: Any, key: Key) -> dict[str, Any]:
    schemas = [_bounded(schema, key) for schema in alternatives(type_, key)]
    default = key.default() if callable(key.default) else key.default
    out = {"description": description(key), **_one_of(schemas if _is_group(schemas) else _or_auto(schemas))}
    return out if isinstance(default, Config) else out | {"default": plain(default)}


def _old(name: str, spelling: str, type_: Any, key: Key) -> dict[str, Any]:
    """Return the schema of an old spelling; one whose value is converted is a boolean."""
    schema = _key(type_, key) if key.old[spelling] is same else {"enum": [True, False, None, AUTO]}
    return {**schema, "description": f"Old: write {name}.", "deprecated": True}


def description(key: Key) -> str:
    """Return what a key does, its unit, and on a second line what it means in fds."""
    lines = [key.doc[:1].upper() + key.doc[1:] + (f" [{key.unit}]" if key.unit else "") + "."]
    if key.differs:
        lines[0] += f" The documentation's default: {plain(key.documented)!r}."
    if key.meaning is not None:
        word = "Not supported yet, and refused" if isinstance(key.meaning, NotYet) else "In fds"
        lines.append(f"{word}: {str(key.meaning).removeprefix('not yet: ')}.")
    return "\n".join(lines)


def plain(value: Any) -> Any:
    """Return a default as JSON: tuples as lists."""
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def _bounded(schema: dict[str, Any], key: Key) -> dict[str, Any]:
    if schema.get("type") not in ("integer", "number"):
        return schema
    bounds = {"minimum": key.low, "maximum": key.high, "exclusiveMinimum": key.over, "exclusiveMaximum": key.under}
    return schema | {word: bound for word, bound in bounds.items() if bound not in (None, math.inf)}


def _is_group(schemas: list[dict[str, Any]]) -> bool:
    """Return whether a key is a record or a dict of records, which cannot be `"auto"`."""
    return any("$ref" in schema or "$ref" in schema.get("additionalProperties", {}) for schema in schemas)


def _or_auto(schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `"auto"` to the alternatives, unless they include it or allow anything."""
    include = any(AUTO in schema.get("enum", ()) or schema.get("type") == "string" for schema in schemas)
    return schemas if include or not schemas else [*schemas, {"const": AUTO}]


def _one_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a value that matches any of these; of any value if there are none."""
    if not schemas:
        return {}
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _add_types(
    records: dict[str, dict[str, Any]],
    cls: type[Config],
    kinds: Mapping[str, type[Config]],
    required: Mapping[str, tuple[str, ...]],
    *,
    of_optimizer: bool,
) -> None:
    """Make the schema of `params` depend on `type`, and let editors offer the known types."""
    names = [optimizer.SPELLED.get(kind, kind) for kind in kinds]
    record = records[cls.__name__]
    record["properties"]["type"]["anyOf"].insert(0, {"enum": names})
    record["allOf"] = []
    for kind, parameters in kinds.items():
        records.setdefault(parameters.__name__, _record(parameters, records))
        any_case = of_optimizer and kind == kind.lower()  # the names of classes of torch.optim are case-sensitive
        pattern = "".join(f"[{c.upper()}{c.lower()}]" if any_case and c.isalpha() else c for c in kind)
        of_kind: dict[str, Any] = {"$ref": f"#/$defs/{parameters.__name__}"}
        then: dict[str, Any] = {"properties": {"params": _one_of([of_kind, *[{"type": "null"}] * of_optimizer])}}
        if kind in required:
            then["required"] = ["params"]
            then["properties"]["params"] |= {"required": list(required[kind])}
        matches = {"properties": {"type": {"type": "string", "pattern": f"^{pattern}$"}}, "required": ["type"]}
        record["allOf"].append({"if": matches, "then": then})


def _first_line(cls: type[Config]) -> str:
    return (cls.__doc__ or "").partition("\n")[0]


_INTRODUCTION = """\
# Keys of DeepSpeed's configuration

What `fds.config.TrainingConfig` reads: every key of the JSON of DeepSpeed 0.19.6, its default there, and what it is
here. A key that is not listed is refused, with its path and the nearest key that is.

- A value may be `"auto"`, but for groups and for what names groups: `resolve(auto=...)` fills it in, or it is the
  default.
- *Documented* is the default of DeepSpeed's documentation, where it is another than that of the code.
  `TrainingConfig.of(json, defaults="docs")` takes it.
- `*` in a path stands for a name of your own.
- *Not yet* is refused, unless the value asks for nothing; *not applicable* is taken, does nothing, and is listed by
  `explain`; *part of* another key matters only where that one asks for something.
- `fds config schema` prints all this as a JSON Schema for editors, `fds explain FILE` what a file comes to.

This page is made by `fds config table > docs/config-keys.md`.
"""
_COLUMNS = ("key", "type", "default", "documented", "unit", "what it does", "here")
_WORDS = {"boolean": "true or false", "null": "null"}


def table() -> str:
    """Return the page in Markdown."""
    return "\n".join([_INTRODUCTION, *_groups(), *_parameters(), *_old_spellings(), *_contradictions(), *_intended()])


def every_key(cls: type[Config], path: str = "") -> Iterator[tuple[str, Any, Key]]:
    """Yield (JSON path, type, key) of all keys of a record and below it; `*` stands for any name."""
    for name, (type_, key) in keys(cls).items():
        here = path if key.flat else f"{path}{name}"
        if not key.flat:
            yield here, type_, key
        below, star = _below(type_)
        if below is not None:
            yield from every_key(below, here if key.flat else f"{here}.{star}")


def parameters() -> dict[str, list[tuple[str, type[Config]]]]:
    """Return the types of optimizers and schedulers, as they are written, with the records of their `params`."""
    optimizers = [(optimizer.SPELLED.get(kind, kind), record) for kind, record in optimizer.OPTIMIZERS.items()]
    return {"optimizer": optimizers, "scheduler": list(optimizer.SCHEDULERS.items())}


def differing() -> Iterator[tuple[str, Key]]:
    """Yield (JSON path, key) of all keys whose default in the documentation differs from the code's."""
    for path, _, key in every_key(TrainingConfig):
        if key.differs:
            yield path, key
    for group, records in parameters().items():
        for type_, record in records:
            for path, _, key in every_key(record, f"{group}[{type_}].params."):
                if key.differs:
                    yield path, key


def _below(type_: Any) -> tuple[type[Config] | None, str]:
    """Return the record below a key, None if there is none, and what is between them in the path."""
    named = get_args(type_)[1] if get_origin(type_) is dict else None
    return (record_of(type_), "") if named is None else (record_of(named), "*.")


def _groups() -> Iterator[str]:
    yield "## All keys\n"
    for name, (type_, key) in keys(TrainingConfig).items():
        record = _below(type_)[0]
        if record is None:
            raise AssertionError(f"{name} is not a group")
        title = _upper(key.doc) if key.flat else f"`{name}`: {key.doc}"
        rows = every_key(record, "" if key.flat else f"{name}.")
        yield from _section(f"### {title}", _COLUMNS, [_row(*row) for row in rows])


def _parameters() -> Iterator[str]:
    for group, records in parameters().items():
        yield f"## `{group}.params`, by type\n"
        for record in dict.fromkeys(record for _, record in records):
            names = ", ".join(f"`{name}`" for name, other in records if other is record)
            yield from _section(f"### {names}", _COLUMNS, [_row(*row) for row in every_key(record, f"{group}.params.")])


def _old_spellings() -> Iterator[str]:
    yield "## Old spellings\n"
    yield "They are taken, with a `FutureWarning` that names the new one; beside the new one they are refused.\n"
    rows = [("`zero_optimization`: true or false", "`zero_optimization.stage`: 1 or 0")]
    for path, _, key in every_key(TrainingConfig):
        for spelling, conversion in key.old.items():
            parent = path.rpartition(".")[0]
            old = f"{parent}.{spelling}" if parent else spelling
            rows.append((f"`{old}`", f"`{path}`" + ("" if conversion is same else ", as its object")))
    yield from _section("", ("old", "new"), rows)


def _contradictions() -> Iterator[str]:
    yield "## Where documentation and code disagree\n"
    yield (
        'Defaults. `defaults="0.19.6"`, which is what holds where nothing is said, takes the code\'s; '
        '`defaults="docs"` the documentation\'s. Held by '
        "`tests/config/test_decisions.py::test_a_default_is_that_of_its_edition`.\n"
    )
    rows = [(f"`{path}`", _json(key.documented), _json(key.default)) for path, key in differing()]
    yield from _section("", ("key", "documentation", "0.19.6"), rows)
    yield "And what is no key's default:\n"
    rows = [(row.topic, row.documented, row.code, row.here, f"`{row.test}`") for row in CONTRADICTIONS]
    yield from _section("", ("topic", "documentation", "code", "fds", "held by"), rows)


def _intended() -> Iterator[str]:
    yield "## Where fds differs from DeepSpeed, and means to\n"
    rows = [(row.deepspeed, row.here, f"`{row.test}`") for row in INTENDED]
    yield from _section("", ("DeepSpeed", "fds", "held by"), rows)


def _row(path: str, type_: Any, key: Key) -> tuple[str, ...]:
    default = "" if _below(type_)[0] is not None and callable(key.default) else _json(key.default)
    documented = _json(key.documented) if key.differs else ""
    here = "its keys say" if key.meaning is None else str(key.meaning)
    return f"`{path}`", _type(type_, key), default, documented, key.unit, key.doc, here


def _type(type_: Any, key: Key) -> str:
    bounds = ((key.low, "≥"), (key.over, ">"), (key.high, "≤"), (key.under, "<"))
    limits = [f"{sign} {bound:g}" for bound, sign in bounds if bound is not None]
    return ", ".join([_words(alternatives(type_, key)), *limits])


def _words(schemas: list[dict[str, Any]]) -> str:
    words = [_word(schema) for schema in schemas] or ["anything"]
    return " or ".join(word for word in dict.fromkeys(words) if not (word == "integer" and "number" in words))


def _word(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(_json(value) for value in schema["enum"])
    if schema.get("type") == "array":
        items = schema["items"].get("anyOf") or [schema["items"]] * bool(schema["items"])
        return f"list of {schema['minItems']} x {_words(items)}" if "minItems" in schema else f"list of {_words(items)}"
    type_: str = schema.get("type", "object")
    return _WORDS.get(type_, type_)


def _json(value: Any) -> str:
    return f"`{json.dumps(value() if callable(value) else plain(value))}`"


def _section(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield an optional title and a table."""
    if title:
        yield f"{title}\n"
    yield _line(columns)
    yield _line(["---"] * len(columns))
    for row in rows:
        yield _line([_cell(text) for text in row])
    yield ""


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _cell(text: str) -> str:
    """Escape the characters that have a meaning in Markdown, except in code."""
    parts = text.replace("|", "\\|").replace("\n", " ").split("`")
    return "`".join(part if i % 2 else part.replace("*", "\\*").replace("<", "\\<") for i, part in enumerate(parts))


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
