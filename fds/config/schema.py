"""A JSON Schema of the whole JSON, for editors: made from the records, which are what is checked.

It says of a key what one value can be told of: type, range, words, spelling. What several keys say together (batch
sizes that multiply, options of a stage) only the records know.

Source: JSON Schema, draft 2020-12, json-schema.org/draft/2020-12.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from fds.config.keys import optimizer, scheduler
from fds.config.meaning import NotYet
from fds.config.record import AUTO, COMMENT, Config, Key, flat_keys, record_of, same
from fds.config.training import TrainingConfig

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", types.NoneType: "null", Any: None}


def schema() -> dict[str, Any]:
    """Return the JSON Schema of what `TrainingConfig.of` takes; a record is one of its `$defs`."""
    records: dict[str, dict[str, Any]] = {}
    whole = _record(TrainingConfig, records)
    zero = whole["properties"]["zero_optimization"]
    reference = {"$ref": zero.pop("$ref")}
    zero["anyOf"] = [reference, {"type": "boolean", "deprecated": True, "description": "Old: write an object"}]
    _add_types(records, optimizer.OptimizerConfig, optimizer.PARAMETERS, {}, of_optimizer=True)
    _add_types(records, scheduler.SchedulerConfig, scheduler.PARAMETERS, scheduler.REQUIRED, of_optimizer=False)
    return {"$schema": DRAFT, "title": "DeepSpeed's configuration, as fds reads it", **whole, "$defs": records}


def options(type_: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas of the alternatives of a type; none for anything at all."""
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


def alternatives(type_: Any, about: Key) -> list[dict[str, Any]]:
    """Return the schemas of the alternatives of a key, null among them where the JSON may give it."""
    found = list(options(type_))
    if about.null is None:
        return found
    return [one for one in found if one != {"type": "null"}] + [{"type": "null"}] * about.null


def _record(cls: type[Config], records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a record's JSON object, and add those of the records below it."""
    known = flat_keys(cls)
    out = {"type": "object", "description": _first_line(cls), "properties": {},
           "patternProperties": {COMMENT: True}, "additionalProperties": False}  # fmt: skip
    for name, (type_, about) in known.items():
        out["properties"][name] = _key(type_, about)
        _add(type_, records)
    old = {spelling: name for name, (_, about) in known.items() for spelling in about.old if spelling not in known}
    for spelling, name in old.items():
        out["properties"][spelling] = _old(name, spelling, known[name])
    if old:
        out["dependentSchemas"] = {
            spelling: {"properties": {other: False for other in (name, *(o for o in old if old[o] == name)) if
                                      other != spelling}} for spelling, name in old.items()
        }  # fmt: skip
    return out


def _add(type_: Any, records: dict[str, dict[str, Any]]) -> None:
    """Add the record that values of a type are, or hold, if there is one."""
    found = record_of(type_)
    if found is not None and found.__name__ not in records:
        records[found.__name__] = {}  # its place, before those of the records below it
        records[found.__name__] |= _record(found, records)
    for one in typing.get_args(type_) if found is None else ():
        _add(one, records)


def _key(type_: Any, about: Key) -> dict[str, Any]:
    found = [_bounded(one, about) for one in alternatives(type_, about)]
    default = about.default() if callable(about.default) else about.default
    out = {"description": description(about), **_one_of(found if _is_group(found) else _or_auto(found))}
    return out if isinstance(default, Config) else out | {"default": plain(default)}


def _old(name: str, spelling: str, key: tuple[Any, Key]) -> dict[str, Any]:
    """Return the schema of an old spelling; what is turned into another value is a switch."""
    type_, about = key
    found = _key(type_, about) if about.old[spelling] is same else {"enum": [True, False, None, AUTO]}
    return {**found, "description": f"Old: write {name}.", "deprecated": True}


def description(about: Key) -> str:
    """Return what a key does, its unit, and on a second line what it is here."""
    lines = [about.doc[:1].upper() + about.doc[1:] + (f" [{about.unit}]" if about.unit else "") + "."]
    if about.differs:
        lines[0] += f" The documentation's default: {plain(about.documented)!r}."
    if about.meaning is not None:
        word = "Not there yet, and refused" if isinstance(about.meaning, NotYet) else "Here"
        lines.append(f"{word}: {str(about.meaning).removeprefix('not yet: ')}.")
    return "\n".join(lines)


def plain(value: Any) -> Any:
    """Return a default as JSON has it."""
    return [plain(one) for one in value] if isinstance(value, tuple) else value


def _bounded(one: dict[str, Any], about: Key) -> dict[str, Any]:
    if one.get("type") not in ("integer", "number"):
        return one
    bounds = {"minimum": about.low, "maximum": about.high, "exclusiveMinimum": about.over,
              "exclusiveMaximum": about.under}
    return one | {word: bound for word, bound in bounds.items() if bound not in (None, math.inf)}


def _is_group(found: list[dict[str, Any]]) -> bool:
    """Return whether a key is a record, or names records: then it is never `"auto"`."""
    return any("$ref" in one or "$ref" in one.get("additionalProperties", {}) for one in found)


def _or_auto(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the alternatives with `"auto"`; of words, with that one; none stays none."""
    words = [one for one in found if AUTO in one.get("enum", ()) or one.get("type") == "string"]
    return found if words or not found else [*found, {"const": AUTO}]


def _one_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of any of these; of anything where there are none."""
    if not found:
        return {}
    return found[0] if len(found) == 1 else {"anyOf": found}


def _add_types(
    records: dict[str, dict[str, Any]], cls: type[Config], kinds: Mapping[str, type[Config]],
    required: Mapping[str, tuple[str, ...]], *, of_optimizer: bool,
) -> None:  # fmt: skip
    """Say of `params` that it follows `type`, and let editors offer the types that are known."""
    names = [optimizer.SPELLED.get(kind, kind) for kind in kinds]
    record = records[cls.__name__]
    record["properties"]["type"]["anyOf"].insert(0, {"enum": names})
    record["allOf"] = []
    for kind, parameters in kinds.items():
        records.setdefault(parameters.__name__, _record(parameters, records))
        any_case = of_optimizer and kind == kind.lower()  # a class of torch.optim has its name in one case only
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
