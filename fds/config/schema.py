"""A JSON Schema of the whole JSON, for editors, generated from the records.

It covers single keys: type, range, choices, spelling. Conditions on several keys (batch sizes that multiply, options of
a ZeRO stage) are checked by the records only.

Source: JSON Schema, draft 2020-12, json-schema.org/draft/2020-12.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from fds.config.field import AUTO, COMMENT, Key, NotYet, flat_keys, same
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
        for one in of:
            yield from options(one)
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
    return [one for one in schemas if one != {"type": "null"}] + [{"type": "null"}] * key.null


def _record(cls: type[Config], records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a record's JSON object, and add the schemas of the records below it to `records`."""
    known = flat_keys(cls)
    out = {
        "type": "object",
        "description": _first_line(cls),
        "properties": {},
        "patternProperties": {COMMENT: True},
        "additionalProperties": False,
    }
    for name, (type_, key) in known.items():
        out["properties"][name] = _key(type_, key)
        _add(type_, records)
    old = {spelling: name for name, (_, key) in known.items() for spelling in key.old if spelling not in known}
    for spelling, name in old.items():
        out["properties"][spelling] = _old(name, spelling, *known[name])
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
    """Add the schemas of the records in a type to `records`."""
    record = record_of(type_)
    if record is not None and record.__name__ not in records:
        records[record.__name__] = {}  # reserves its position before the records below it
        records[record.__name__] |= _record(record, records)
    for one in typing.get_args(type_) if record is None else ():
        _add(one, records)


def _key(type_: Any, key: Key) -> dict[str, Any]:
    schemas = [_bounded(one, key) for one in alternatives(type_, key)]
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
    return [plain(one) for one in value] if isinstance(value, tuple) else value


def _bounded(schema: dict[str, Any], key: Key) -> dict[str, Any]:
    if schema.get("type") not in ("integer", "number"):
        return schema
    bounds = {"minimum": key.low, "maximum": key.high, "exclusiveMinimum": key.over, "exclusiveMaximum": key.under}
    return schema | {word: bound for word, bound in bounds.items() if bound not in (None, math.inf)}


def _is_group(schemas: list[dict[str, Any]]) -> bool:
    """Return whether a key is a record or a dict of records, which cannot be `"auto"`."""
    return any("$ref" in one or "$ref" in one.get("additionalProperties", {}) for one in schemas)


def _or_auto(schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `"auto"` to the alternatives, unless they include it or allow anything."""
    include = any(AUTO in one.get("enum", ()) or one.get("type") == "string" for one in schemas)
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
